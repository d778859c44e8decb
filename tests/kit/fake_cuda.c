// A CUDA runtime and driver that do everything at once, on the CPU, and are as strict as the real ones where a caller
// can get it wrong: registrations must not overlap and end by the address they began with, an error stays with its
// thread until it is taken, a batch has one struct of attributes and no default stream.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define INVALID 1
#define OUT_OF_MEMORY 2
#define NO_DEVICE 101
#define CAPTURING 900
#define NOT_FOUND 500
#define ALREADY_REGISTERED 712
#define NOT_REGISTERED 713
#define REGISTRATIONS_MAX 65536

static struct { char *start; size_t size; int device; } registrations[REGISTRATIONS_MAX];
static int count, registered_ever, refuse_after = -1, has_batch = 1, is_capturing, keeps_all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int kept_error, device, capture_mode;

static int fail(int code) { return kept_error = code; }

int cudaGetLastError(void) { int code = kept_error; kept_error = 0; return code; }

int cudaSetDevice(int index) {
    if (index < 0 || index > 7) return fail(NO_DEVICE);
    device = index;
    return 0;
}

int cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    if (*mode < 0 || *mode > 2) return fail(INVALID);
    capture_mode = *mode;
    *mode = before;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int index) {
    if (attribute != 91 || index < 0 || index > 7) return fail(INVALID);
    *value = 1;
    return 0;
}

int cudaHostRegister(void *start, size_t size, unsigned flags) {
    int code = 0;
    if (is_capturing && capture_mode != 2) return fail(CAPTURING);
    if (!start || !size || flags > 15) return fail(INVALID);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        if (registrations[i].start < (char *)start + size && (char *)start < registrations[i].start + registrations[i].size)
            code = ALREADY_REGISTERED;
    if (!code && (count == REGISTRATIONS_MAX || (refuse_after >= 0 && registered_ever >= refuse_after)))
        code = OUT_OF_MEMORY;
    if (!code) {
        registrations[count].start = start;
        registrations[count].size = size;
        registrations[count++].device = device;
        registered_ever++;
    }
    pthread_mutex_unlock(&lock);
    return code ? fail(code) : 0;
}

int cudaHostUnregister(void *start) {
    int code = NOT_REGISTERED;
    if (is_capturing && capture_mode != 2) return fail(CAPTURING);
    if (keeps_all) return fail(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        if (registrations[i].start == start) { registrations[i] = registrations[--count]; code = 0; break; }
    pthread_mutex_unlock(&lock);
    return code ? fail(code) : 0;
}

struct location { unsigned type; int id; };
struct attributes { unsigned order; struct location source, destination; unsigned flags; };

static int batch(uint64_t *to, uint64_t *from, size_t *sizes, size_t copies, struct attributes *attributes,
                 size_t *firsts, size_t attribute_count, size_t *refused, void *stream) {
    struct location none = {0, 0};
    int is_sound = stream && attribute_count == 1 && firsts[0] == 0 && !attributes->flags
        && (attributes->order == 1 || attributes->order == 3)
        && !memcmp(&attributes->source, &none, sizeof none) && !memcmp(&attributes->destination, &none, sizeof none);
    *refused = (size_t)-1;
    if (!is_sound) return INVALID;
    for (size_t i = 0; i < copies; i++) {
        if (!sizes[i]) { *refused = i; return INVALID; }
        memcpy((void *)to[i], (void *)from[i], sizes[i]);
    }
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    int is_known = has_batch && !strcmp(name, "cuMemcpyBatchAsync") && version == 12080 && !flags;
    *found = is_known ? (void *)batch : 0;
    *status = !is_known;
    return is_known ? 0 : NOT_FOUND;
}

// What a test asks and sets.

int fake_registrations(void) { return count; }

// Whether every byte of a range is registered, from a device (-1: any).
int fake_is_registered(char *start, size_t size, int from) {
    char *at = start;
    int went_on = 1;
    pthread_mutex_lock(&lock);
    while (at < start + size && went_on) {
        went_on = 0;
        for (int i = 0; i < count; i++)
            if (registrations[i].start <= at && at < registrations[i].start + registrations[i].size
                && (from < 0 || registrations[i].device == from)) {
                at = registrations[i].start + registrations[i].size;
                went_on = 1;
            }
    }
    pthread_mutex_unlock(&lock);
    return at >= start + size;
}

// Registrations that touch a range.
int fake_registered_in(char *start, size_t size) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        found += registrations[i].start < start + size && start < registrations[i].start + registrations[i].size;
    pthread_mutex_unlock(&lock);
    return found;
}

int fake_capture_mode(void) { return capture_mode; }
int fake_kept_error(void) { return kept_error; }
void fake_refuse_after(int registrations) { refuse_after = registrations < 0 ? -1 : registered_ever + registrations; }
void fake_set_batch(int has) { has_batch = has; }
void fake_set_capturing(int is) { is_capturing = is; }
void fake_keep_registrations(int all) { keeps_all = all; }
