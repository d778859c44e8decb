"""What bounds how much of tiering's work one step does: module and constant of each, for tests that draw them."""

from tiered_kv.tiering import host_tier, lookups, secondary_tier, slot_grants, write_through

PARTS = (
    (lookups, "READ_AT_ONCE"),
    (lookups, "EVICTED_AT_ONCE"),
    (host_tier, "HELD_TAKEN_OUT_AT_ONCE"),
    (host_tier, "EVICTED_AT_ONCE"),
    (slot_grants, "EVICTED_AT_ONCE"),
    (secondary_tier, "WRITTEN_AGAIN_AT_ONCE"),
    (write_through, "REFILLED_AT_ONCE"),
)
