"""Evaluates a profile: seconds by stage, by folder and by function, and stages whose share grew since another profile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telemetry.sampling import Stack

if TYPE_CHECKING:
    from pyinstrument.session import Session

_ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "inference": "engine", "game": "board and prompts", "decoding": "tables and tokens", "rollouts": "forks and rows",
    "storage": "store", "training": "training", "tasks": "tasks", "flows": "flow", "state_cache": "start positions",
    "evaluation": "evaluation", "telemetry": "telemetry",
}  # fmt: skip
"""Folder of this repository -> the work that is done in it."""
WAITING, ELSEWHERE = "waiting", "libraries"
_WAITS = {"select", "poll", "acquire", "recv", "recv_into", "readinto", "readline", "sleep", "wait", "accept", "read"}
"""Built-in functions in which a thread waits."""


def summed(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum the stages of several steps."""
    total: dict[str, float] = {}
    for stages in steps:
        for stage, seconds in stages.items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def write_flame_graphs(threads: Mapping[str, "Session"], profile: Path) -> dict[str, Path]:
    """Write pyinstrument's page of each thread beside the file `profile`, and return the pages by thread."""
    from pyinstrument.renderers.html import HTMLRenderer

    pages = {name: profile.with_name(f"{profile.stem}-{name}.html") for name in threads}
    for name, session in threads.items():
        pages[name].write_text(HTMLRenderer().render(session), encoding="utf-8")
    return pages


def room_of(stack: Stack) -> str:
    """What a thread does: it waits, or it works in the folder of the innermost frame of this repository."""
    file, _, function = stack[-1].rpartition(":") if stack else ("", "", "")
    # An event loop written in C (uvloop) has no frame of its own: its innermost frame is the one that started it.
    if (not file and function.rpartition(".")[2] in _WAITS) or file.endswith("asyncio/runners.py"):
        return WAITING
    return next((ROOMS[room] for frame in reversed(stack) if (room := our_room(frame)) in ROOMS), ELSEWHERE)


def our_room(frame: str) -> str:
    """Folder of this repository that contains a frame's file; '' for a library."""
    file = frame.rpartition(":")[0]
    if not file.startswith(f"{_ROOT}/"):
        return ""
    room, _, rest = file[len(str(_ROOT)) + 1 :].partition("/")
    return room if rest and not room.startswith(".") else ""


def rooms(folded: Mapping[Stack, float]) -> dict[str, float]:
    """Seconds by the thread's work, most first."""
    found: dict[str, float] = {}
    for stack, seconds in folded.items():
        room = room_of(stack)
        found[room] = found.get(room, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def hottest(folded: Mapping[Stack, float], most: int = 10) -> dict[str, float]:
    """Seconds by the innermost function of this repository, without waiting, most first."""
    found: dict[str, float] = {}
    for stack, seconds in folded.items():
        if room_of(stack) != WAITING and (ours := [frame for frame in stack if our_room(frame)]):
            name = ours[-1][len(str(_ROOT)) + 1 :]
            found[name] = found.get(name, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda each: -each[1])[:most])


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A stage's share of the time in two profiles."""

    stage: str
    now: float
    before: float

    def sentence(self) -> str:
        """In words."""
        return f"{self.stage}: {self.now:.1%} of the time, {self.before:.1%} in the baseline"


def grown(now: Mapping[str, float], before: Mapping[str, float], tolerance: float) -> list[Growth]:
    """Stages whose share grew by more than `tolerance`, largest growth first; a new stage had share 0."""
    found = [Growth(stage=stage, now=share, before=before.get(stage, 0.0)) for stage, share in now.items()]
    more = [each for each in found if each.now - each.before > tolerance]
    return sorted(more, key=lambda each: each.before - each.now)


def shares(stages: Mapping[str, float]) -> dict[str, float]:
    """Parts of the whole."""
    whole = sum(stages.values())
    return {stage: seconds / whole if whole else 0.0 for stage, seconds in stages.items()}


def as_object(
    kind: str,
    stages: Mapping[str, float],
    threads: Mapping[str, Mapping[Stack, float]],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The profile as it is stored."""
    parts = shares(stages)
    return {
        "profile": kind,
        **more,
        "seconds": round(sum(stages.values()), 4),
        "stages": {stage: {"seconds": round(stages[stage], 4), "share": round(parts[stage], 5)} for stage in stages},
        "threads": {
            name: {
                "seconds": round(sum(folded.values()), 4),
                "shares": {room: round(share, 5) for room, share in shares(rooms(folded)).items()},
                "hottest": {place: round(seconds, 4) for place, seconds in hottest(folded).items()},
            }
            for name, folded in threads.items()
        },
    }
