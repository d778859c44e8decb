"""Requests like those of a chat service, drawn from a seed: block ids per prompt, equal ids for an equal prefix.

Every prompt begins with the same block. Three conversations of ten come back, with all or a part of their prompt and
more behind it; of those that did, seven of ten do so again.
"""

import itertools
import random


def conversations(seed: int, request_count: int) -> list[list[int]]:
    source = random.Random(seed)
    ids = itertools.count(1)
    requests: list[list[int]] = []
    open_ones: list[list[int]] = []
    for _ in range(request_count):
        is_back = bool(open_ones) and source.random() < 0.35
        prompt = open_ones.pop(source.randrange(len(open_ones))) if is_back else [0]
        prompt = prompt + [next(ids) for _ in range(1 + min(int(source.expovariate(0.1)), 80))]
        requests.append(prompt)
        if source.random() < (0.7 if is_back else 0.3):
            open_ones.append(prompt if source.random() < 0.8 else prompt[: source.randrange(1, len(prompt) + 1)])
    return requests
