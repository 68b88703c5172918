"""A server of legal orders on a thread of the test's process, over real HTTP."""

import threading
from pathlib import Path
from typing import Any

from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.live_games.http_server import bind, make_server
from entente.live_games.orders_server import OrderSampler, ServedPolicy, orders_app
from entente.players.policy import Tokens
from tests.waiting import wait_until

MODEL = "mine:v3"
PUBLISHED = Path(__file__).parents[2] / "models" / "whole-192"


class ApiHere:
    """Started when it is made."""

    def __init__(self, engine: Engine, tokens: Tokens, *, key: str | None = None, most: int = 64, own: bool = True) -> None:
        self.host = EngineHost("api-engine")
        self.host.submit(engine.start()).result(timeout=60)
        self.policy = ServedPolicy(name=MODEL, fingerprint="0123", host=self.host, engine=engine, tokens=tokens, version=0)
        self.samples = OrderSampler(self.policy, most)
        self._listener = bind("127.0.0.1", 0, None)
        self.port = self._listener.getsockname()[1]
        app = orders_app(self.samples, key, [f"127.0.0.1:{self.port}", f"localhost:{self.port}"] if own else [])
        self.server = make_server(app, drain_s=1)
        self.samples.on_failure = lambda: setattr(self.server, "should_exit", True)
        self._thread = threading.Thread(target=lambda: self.server.run(sockets=[self._listener]))
        self._thread.start()
        wait_until(lambda: self.server.started)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **how: Any) -> Any:
        """The official client, which asks once."""
        from openai import OpenAI

        return OpenAI(**{"base_url": self.base_url, "api_key": "none", "max_retries": 0, "timeout": 120, **how})

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        self.host.submit(self.policy.engine.close()).result(timeout=20)
        self.host.close()
        self._listener.close()
