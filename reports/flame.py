"""A flame graph as one page: width is time, and a row is a call, made by what stands above it.

Promise: self-contained and readable without a network; frames of libraries are drawn as one box a library, so that our own calls
can be seen. Pointing at a box says its name and time; a click makes it as wide as the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from reports.profile import ROOMS, WAITING, our_room, room_of
from telemetry.sampling import Stack

_ROOT = Path(__file__).resolve().parent.parent
_WIDTH, _ROW = 1200, 18
_LEAST = 0.001
"""Share of a thread's time below which a box is not drawn."""
_COLOURS = {
    "engine": "#e8a33d", "board and prompts": "#7aa874", "tables and tokens": "#5f9ea0", "forks and rows": "#9a86c4",
    "store": "#4f83b5", "training": "#d9694f", "flow": "#b0a06a", "tasks": "#b0a06a",
}  # fmt: skip
_LIBRARY, _IDLE = "#c9c5bd", "#e6e4df"


@dataclass(slots=True)
class _Box:
    name: str
    colour: str
    seconds: float = 0.0
    inner: dict[str, "_Box"] = field(default_factory=dict)


def flame_page(title: str, threads: Mapping[str, Mapping[Stack, float]], told: str = "") -> str:
    """The page: one graph a thread; `told` is a sentence under the title."""
    graphs = "".join(_graph(name, folded) for name, folded in threads.items())
    key = "".join(f'<span><i style="background:{colour}"></i>{escape(room)}</span>' for room, colour in _COLOURS.items())
    key += f'<span><i style="background:{_LIBRARY}"></i>libraries</span><span><i style="background:{_IDLE}"></i>waiting</span>'
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(told)}</p><p class=key>{key}</p>{graphs}<p id=said>&nbsp;</p>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def _graph(name: str, folded: Mapping[Stack, float]) -> str:
    root = _tree(name, folded)
    boxes: list[str] = []
    depth = _draw(root, 0.0, 0, root.seconds, boxes)
    idle = sum(seconds for stack, seconds in folded.items() if room_of(stack) == WAITING) / root.seconds
    height = depth * _ROW
    return (
        f"<h2>{escape(name)}: {root.seconds:,.2f} s, {idle:.0%} of it waiting</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">{"".join(boxes)}</svg>'
    )


def _tree(name: str, folded: Mapping[Stack, float]) -> _Box:
    root = _Box(name, _LIBRARY)
    for stack, seconds in folded.items():
        at, idle = root, room_of(stack) == WAITING
        root.seconds += seconds
        for label, room in _labels(stack):
            colour = _IDLE if idle and not room else _COLOURS.get(ROOMS.get(room, ""), _LIBRARY)
            at = at.inner.setdefault(label, _Box(label, colour))
            at.seconds += seconds
    return root


def _labels(stack: Stack) -> list[tuple[str, str]]:
    """Names of the boxes of a stack, with the room of ours; neighbours of one library are one box."""
    found: list[tuple[str, str]] = []
    for frame in stack:
        file, _, function = frame.rpartition(":")
        room = our_room(frame)
        label = f"{file[len(str(_ROOT)) + 1 :]}: {function}" if room else _library(file, function)
        if not found or found[-1][0] != label:
            found.append((label, room))
    return found


def _library(file: str, function: str) -> str:
    if not file:
        return f"{function} (built in)"
    parts = Path(file).parts
    if "site-packages" in parts:
        return Path(parts[parts.index("site-packages") + 1]).stem
    inside = next((place for place, part in enumerate(parts) if part.startswith("python3")), None)
    return Path(parts[inside + 1]).stem if inside is not None and inside + 1 < len(parts) else Path(file).stem


def _draw(box: _Box, x: float, level: int, whole: float, boxes: list[str]) -> int:
    """Draw a box and those above it; how many rows that took."""
    width = _WIDTH * box.seconds / whole
    words = f"{box.name}: {box.seconds:,.3f} s, {box.seconds / whole:.1%}"
    letters = int((width - 6) / 6.2)
    text = ""
    if letters >= 3:
        short = box.name if len(box.name) <= letters else box.name[: letters - 1] + "…"
        text = f'<text x="{x + 3:.2f}" y="{level * _ROW + 13}">{escape(short)}</text>'
    boxes.append(
        f'<g data-x="{x:.3f}" data-w="{width:.3f}" data-n="{escape(box.name)}"><title>{escape(words)}</title>'
        f'<rect x="{x:.2f}" y="{level * _ROW}" width="{width:.2f}" height="{_ROW - 1}" fill="{box.colour}"/>{text}</g>'
    )
    rows = level + 1
    for inner in sorted(box.inner.values(), key=lambda each: -each.seconds):
        if inner.seconds >= _LEAST * whole:
            rows = max(rows, _draw(inner, x, level + 1, whole, boxes))
        x += _WIDTH * inner.seconds / whole
    return rows


_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;color:#26241f;background:#fbfaf7;margin:2rem auto;max-width:1200px;padding:0 1rem}
h1{font-size:1.3rem;margin:0}h2{font-size:1rem;margin:1.6rem 0 .4rem}p{margin:.3rem 0}
svg{display:block;max-width:100%;height:auto}svg text{font:11px ui-monospace,monospace;fill:#26241f;pointer-events:none}
g{cursor:pointer}g:hover rect{stroke:#26241f;stroke-width:1}.key span{margin-right:1rem;white-space:nowrap}
.key i{display:inline-block;width:.9em;height:.9em;margin-right:.35em;vertical-align:-.1em}
#said{position:sticky;bottom:0;background:#fbfaf7;padding:.4rem 0;font-family:ui-monospace,monospace;font-size:12px}
@media(prefers-color-scheme:dark){body,#said{background:#1d1c19;color:#e8e5dc}g:hover rect{stroke:#fff}}
"""
_SCRIPT = """
const W=1200,said=document.getElementById('said');
for(const svg of document.querySelectorAll('svg')){const all=[...svg.querySelectorAll('g')];
 let from=0,wide=W;
 svg.onmouseover=e=>{const g=e.target.closest('g');if(g)said.textContent=g.firstChild.textContent};
 svg.onclick=e=>{const g=e.target.closest('g');if(!g)return;
  const x=+g.dataset.x,w=+g.dataset.w;[from,wide]=(x===from&&w===wide)?[0,W]:[x,w];
  for(const b of all){const k=W/wide,left=(b.dataset.x-from)*k,width=b.dataset.w*k,r=b.querySelector('rect');
   const a=Math.max(0,left),z=Math.min(W,left+width);b.style.display=z-a>.3?'':'none';if(z-a<=.3)continue;
   r.setAttribute('x',a);r.setAttribute('width',z-a);
   let t=b.querySelector('text');const n=Math.floor((z-a-6)/6.2),name=b.dataset.n;
   if(n<3){if(t)t.textContent='';continue}
   if(!t){t=document.createElementNS('http://www.w3.org/2000/svg','text');t.setAttribute('y',+r.getAttribute('y')+13);
    b.append(t)}
   t.setAttribute('x',a+3);t.textContent=name.length<=n?name:name.slice(0,n-1)+'\\u2026'}}}
"""
