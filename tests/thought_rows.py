"""Gives the decisions of a stored run thoughts, without any of the code that reads them."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from entente.decoding.model_files import end_token_ids
from entente.records.rows import Decision, PlayedPhase
from storage.runs import RunPaths
from storage.shards import open_phases, open_shard, publish_shard

LOGPROB = -1.5
"""Behaviour logprob of every thought token."""


def add_thoughts(paths: RunPaths, thoughts: Sequence[tuple[str, bool]]) -> None:
    """Publish all shards again, with a thought before the orders of each decision.

    Args:
        thoughts: text, and whether it was ended by force; decision i gets number i, from the start again after the last.
    """
    (folder,) = (paths.root.parent / "_models").glob("tiny-*")
    tokenizer, eos = Tokenizer.from_file(str(folder / "tokenizer.json")), end_token_ids(folder)[0]

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    (marker,) = ids("\n")
    for file in [file for file in paths.shards.rglob("*.arrow") if not file.name.endswith(".phases.arrow")]:
        table = open_shard(file)
        rows, phases = table.to_pylist(), [PlayedPhase(**row) for row in open_phases(file, table).to_pylist()]
        for row, (text, truncated) in zip(rows, list(thoughts) * len(rows), strict=False):
            _insert(row, ids(text), truncated, marker, ids("ORDERS:\n"), [-1 - eos, tokenizer.get_vocab_size()])
        metadata = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
        after, first = int(metadata.pop("next_start_group")), min(row["start_group"] for row in rows)
        for old in file.parent.glob(f"{file.stem}.*"):
            old.unlink()
        del table
        own = {name: metadata[name] for name in ("run", "base_model", "tokenizer", "settings")}
        publish_shard(paths, file.parent.name, first, [Decision(**row) for row in rows], phases, own, next_start_group=after)


def _insert(row: dict[str, Any], text: list[int], truncated: bool, marker: int, closing: list[int], any_id: list[int]) -> None:
    """Make a thought the first part of the row's completion."""
    thought = text if truncated else [*text, marker]
    forced = [marker, *closing] if truncated else closing
    begin = row["prompt_len"]
    row["input_ids"] = [*row["input_ids"][:begin], *thought, *forced, *row["input_ids"][begin:]]
    row["behaviour_logprobs"] = [LOGPROB] * len(thought) + [0.0] * len(forced) + row["behaviour_logprobs"]
    sets = [any_id] * len(thought) + [[token] for token in forced]
    before = sum(map(len, sets))
    row["legal_ids"] = [token for allowed in sets for token in allowed] + row["legal_ids"]
    ends = [sum(map(len, sets[: place + 1])) for place in range(len(sets))]
    row["legal_offsets"] = [0, *ends, *(before + end for end in row["legal_offsets"][1:])]
