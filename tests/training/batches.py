"""Made-up batches: decisions given as token lists, with legal sets that hang on the tokens before."""

import zlib
from dataclasses import replace

import numpy as np

from entente.decoding.open_set import set_size
from storage.gather import Batch

VOCABULARY = 64


def batch_of(rows: list[tuple[list[int], list[int]]], *, groups: list[int] | None = None, widest: int = 5) -> Batch:
    """A batch of (prompt, completion); equal tokens before a place give it equal legal sets, but for the drawn token's own."""
    ids, input_offsets, prompts, logprobs, completion_offsets = [], [0], [], [], [0]
    legal, legal_offsets = [], [0]
    for prompt, completion in rows:
        ids += prompt + completion
        input_offsets.append(len(ids))
        prompts.append(len(prompt))
        for place, token in enumerate(completion):
            rng = np.random.default_rng(zlib.crc32(np.array(prompt + completion[:place]).tobytes()))
            size = int(rng.integers(1, widest + 1))
            others = [int(other) for other in rng.permutation(VOCABULARY) if other != token][: size - 1]
            legal += sorted([*others, token])
            legal_offsets.append(len(legal))
            logprobs.append(-float(np.log(size)))
        completion_offsets.append(len(logprobs))
    count = len(rows)
    return Batch(
        decision_ids=np.arange(1000, 1000 + count),
        input_ids=np.array(ids, np.int32),
        input_offsets=np.array(input_offsets, np.int64),
        prompt_lens=np.array(prompts, np.int32),
        behaviour_logprobs=np.array(logprobs, np.float32),
        completion_offsets=np.array(completion_offsets, np.int64),
        legal_ids=np.array(legal, np.int32),
        legal_offsets=np.array(legal_offsets, np.int64),
        temperatures=np.linspace(0.8, 1.2, count, dtype=np.float32),
        returns=np.arange(count, dtype=np.float64),
        advantage_groups=np.array(groups if groups is not None else [0] * count, np.int32),
        policy_versions=np.zeros(count, np.int32),
    )


def three_levels(seed: int = 0, *, positions: int = 2, powers: int = 2, forks: int = 3) -> Batch:
    """Rules, boards, powers and answers; some answers are alike, some begin alike."""
    rng = np.random.default_rng(seed)

    def tokens(count: int, below: int = VOCABULARY) -> list[int]:
        return rng.integers(0, below, count).tolist()

    rules, rows, groups = tokens(12), [], []
    for _ in range(positions):
        board = rules + tokens(int(rng.integers(5, 9)))
        for _ in range(powers):
            prompt = board + tokens(int(rng.integers(2, 6)))
            number = groups[-1] + 1 if groups else 0
            for _ in range(forks):
                rows.append((prompt, tokens(int(rng.integers(1, 8)), below=2)))
                groups.append(number)
    return batch_of(rows, groups=groups)


def with_thoughts(batch: Batch, tokens: int, *open_sets: np.ndarray) -> Batch:
    """The batch as if the first `tokens` tokens of each completion were a thought, drawn from these sets in turn."""
    sets = np.split(batch.legal_ids, batch.legal_offsets[1:-1])
    logprobs = batch.behaviour_logprobs.copy()
    for first, after in zip(batch.completion_offsets[:-1], batch.completion_offsets[1:], strict=True):
        for place in range(first, min(first + tokens, after)):
            sets[place] = open_sets[place % len(open_sets)]
            logprobs[place] = -np.log(set_size(sets[place]))
    offsets = np.cumsum([0, *map(len, sets)])
    return replace(batch, legal_ids=np.concatenate(sets), legal_offsets=offsets, behaviour_logprobs=logprobs)
