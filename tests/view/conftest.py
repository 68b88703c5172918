"""A viewer of a stored run, asked without a socket; and the command in a browser."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from entente.view.server import view_app
from entente.view.viewer import Viewer
from storage.runs import RunPaths

ADDRESS, KEY = "127.0.0.1:8765", "the-key"


class Asked:
    """A viewer and its answers to single requests."""

    def __init__(self, runs_root: Path) -> None:
        self.viewer = Viewer(runs_root, KEY)
        self.app = view_app(self.viewer, ADDRESS)

    def __call__(self, address: str, headers: Mapping[str, str] | None = None, **fields: str) -> httpx.Response:
        """POST with `fields`, else GET. `address`: with its key, or a path that gets it."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)  # pyright: ignore[reportArgumentType]
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{ADDRESS}", headers=headers) as client:
                place = address if "key=" in address else f"{address}{'&' if '?' in address else '?'}key={KEY}"
                return await (client.post(place, data=fields) if fields else client.get(place))

        return asyncio.run(ask())

    def drawn(self, run: str = "before") -> str:
        """The page of a run, all of whose parts are drawn."""
        live = self.viewer.live(run)
        while live.draw_next():
            pass
        answer = self(f"/run/{run}")
        assert answer.status_code == 200
        return answer.text

    def links(self, address: str, kind: str) -> list[str]:
        """The links of a page to pages of a kind."""
        return [link.replace("&amp;", "&") for link in re.findall(rf'href="(/run/[^/"]+/{kind}\?[^"#]*)', self(address).text)]


@pytest.fixture
def asked(stored_run: RunPaths) -> Iterator[Asked]:
    asked = Asked(stored_run.root.parent)
    yield asked
    asked.viewer.close()


@pytest.fixture
def decision(asked: Asked) -> Callable[[], str]:
    """The address of the best decision of the widest group that step 1 trained on."""
    return lambda: asked.links(asked.links("/run/before/step?step=1", "group")[0], "decision")[0]
