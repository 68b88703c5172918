"""Diplomacy as a PettingZoo environment (AEC): one agent a power, one masked action a unit.

    observation   int8 [FEATURES], see `entente.integrations.board_features`
    text          the prompt of the power, ending with its orders of this phase so far
    action_mask   int8 [actions], 1 where an action of `entente.integrations.unit_actions` is legal

Powers order alphabetically, unit by unit, and do not see each other's orders; units with one legal order are skipped. The reward
of a phase is the change of one reward component. A power without units and centres is terminated; a win or a draw terminates all.
After `years` game years all are truncated, before a winter in which no reward could change.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

from entente.game.board import Board
from entente.game.prompts import PromptSettings, board_text, power_text, rules_text
from entente.game.render import draw_board
from entente.game.scores import PowerScores, components, horizon_reached
from entente.game.snapshot import POWERS, Snapshot
from entente.integrations.board_features import FEATURES, BoardFeatures
from entente.integrations.unit_actions import UnitChoices, action_texts
from entente.telemetry.errors import InputError

REWARDS = ("centres_gained", "sos_share", "draw_share", "survival", "leader_gap", "balance")
"""Components that follow from the centres alone; see `entente.game.scores`."""
MOST_YEARS = 100
"""The rules end a game in a draw after this many years."""
PROMPTS = PromptSettings(own_line="in_place")
"""The board text is then the same for all powers of a position, and is built once."""
_LONGEST_TEXT = 8192
_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 \n.,:;|/-()+"


def env(**arguments: Any) -> "DiplomacyEnv":
    return DiplomacyEnv(**arguments)


class DiplomacyEnv(AECEnv[str, dict[str, Any], int]):
    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "name": "entente_v0",
        "render_modes": ["human", "ansi", "svg"],
        "is_parallelizable": False,
    }

    def __init__(
        self,
        *,
        positions: Sequence[Snapshot] = (),
        years: int = 3,
        reward: str = "centres_gained",
        render_mode: str | None = None,
    ) -> None:
        """Call `reset` before the first step.

        Args:
            positions: snapshots to sample start positions from; empty: spring 1901.
            years: game years until all agents are truncated, at most MOST_YEARS.
            render_mode: 'ansi', the board's text; 'svg', a picture; 'human', the text on standard output.

        Raises:
            InputError: an argument has another value.
        """
        if not 1 <= years <= MOST_YEARS:
            raise InputError(f"{years} game years cannot be played: give 1 to {MOST_YEARS}, after which a game is drawn")
        if reward not in REWARDS:
            raise InputError(f"there is no reward {reward!r}: choose one of {', '.join(REWARDS)}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise InputError(f"there is no render mode {render_mode!r}: choose one of {', '.join(self.metadata['render_modes'])}")
        self.render_mode, self._years, self._reward = render_mode, years, reward
        self._positions, self._dice = tuple(positions), random.Random()
        self.possible_agents, self.agents = list(POWERS), []
        self._action_spaces = {power: spaces.Discrete(len(action_texts())) for power in POWERS}
        self._observation_spaces = {
            power: spaces.Dict(
                {
                    "observation": spaces.Box(0, 127, (FEATURES,), np.int8),
                    "text": spaces.Text(_LONGEST_TEXT, min_length=0, charset=_CHARACTERS),
                    "action_mask": spaces.Box(0, 1, (len(action_texts()),), np.int8),
                }
            )
            for power in POWERS
        }
        self._board: Board | None = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """`options`: "snapshot", id of the start position; InputError if unknown. `seed` None: continue the sequence."""
        if seed is not None:
            self._dice = random.Random(seed)
        if self._board is not None:
            self._board.release()
        self._board = board = self._start((options or {}).get("snapshot"))
        self._start_phase, self._start_year, self._centres = board.phase, board.year, board.centre_counts()
        self.agents = [power for power in POWERS if board.is_alive(power)]
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {power: {} for power in self.agents}
        self._skip_agent_selection = None
        self._enter_phase()
        if not self._asked:  # all adjustments of the start position are forced
            self._play_phase()

    def observe(self, agent: str) -> dict[str, Any]:
        """The mask is all 0 while `agent` has nothing to order."""
        choices, mask = self._choices.get(agent), np.zeros(len(action_texts()), np.int8)
        if choices is None:
            return {"observation": self._features.of(agent), "text": self._text(agent), "action_mask": mask}
        mask[choices.actions] = 1
        site = "" if choices.is_done else choices.legal.sites[choices.site]
        order_lines = "".join(f"{order}\n" for order in choices.orders)
        features = self._features.of(agent, site, choices.orders)
        return {"observation": features, "text": self._text(agent) + order_lines, "action_mask": mask}

    def step(self, action: int | None) -> None:
        """Order the current unit; the phase's last order resolves it. Raises InputError if masked or no game is in progress."""
        if self._board is None or not self.agents:
            raise InputError("no game is being played: call reset() first")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)  # type: ignore[arg-type]
            return
        choices = self._choices[agent]
        if action is None or not choices.take(int(action)):
            named = action_texts()[action] if action is not None and 0 <= action < len(action_texts()) else "no action"
            raise InputError(
                f"action {action} ({named}) is masked for {choices.legal.sites[choices.site]} of {agent} in {self._board.phase}: "
                "sample one where 'action_mask' is 1"
            )
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if choices.is_done:
            self._asked.remove(agent)
            if self._asked:
                self.agent_selection = self._asked[0]
            else:
                self._play_phase()

    def render(self) -> str | None:  # type: ignore[override]
        """Raises InputError without a game or a render mode."""
        if self._board is None or self.render_mode is None:
            raise InputError("there is nothing to render: set render_mode, and call reset() first")
        if self.render_mode == "svg":
            return draw_board(self._board)
        text = board_text(self._board, "", PROMPTS)
        if self.render_mode == "ansi":
            return text
        sys.stdout.write(text)
        return None

    def position(self) -> Snapshot:
        """The current position, to start another environment from. Raises InputError if no game is in progress."""
        if self._board is None:
            raise InputError("no game is being played: call reset() first")
        return self._board.snapshot(game_id="", seed=0, source="environment")

    def close(self) -> None:
        if self._board is not None:
            self._board.release()
            self._board = None

    def _start(self, snapshot_id: str | None) -> Board:
        if snapshot_id is None:
            return Board.restore(self._dice.choice(self._positions)) if self._positions else _first_board().fork()
        start = next((each for each in self._positions if each.snapshot_id == snapshot_id), None)
        if start is None:
            raise InputError(
                f"there is no snapshot {snapshot_id!r} among the {len(self._positions)} positions of this environment"
            )
        return Board.restore(start)

    def _play_phase(self) -> None:
        board = self._board
        assert board is not None
        while True:
            board.advance({power: _complete(choices) for power, choices in self._choices.items()})
            self._reward_changes(board)
            is_late = not board.is_over and horizon_reached(self._start_phase, board.phase, self._years)
            for agent in self.agents:
                self.terminations[agent] = board.is_over or not board.is_alive(agent)
                self.truncations[agent] = is_late and not self.terminations[agent]
            self._enter_phase(is_last=is_late or board.is_over)
            if self._asked or is_late or board.is_over:
                break
        self._accumulate_rewards()
        self._deads_step_first()

    def _enter_phase(self, *, is_last: bool = False) -> None:
        board = self._board
        assert board is not None
        legal = {} if is_last else board.legal_orders()
        self._choices = {power: UnitChoices(own) for power, own in legal.items()}
        self._asked = [power for power, choices in self._choices.items() if not choices.is_done]
        self._features, self._texts = BoardFeatures(board, self._start_year), dict[str, str]()
        if self._asked:
            self.agent_selection = self._asked[0]

    def _reward_changes(self, board: Board) -> None:
        before, self._centres = self._centres, board.centre_counts()
        if before != self._centres:
            power_scores = PowerScores(centres=before), PowerScores(centres=self._centres)
            for agent in self.agents:
                self.rewards[agent] += components(*power_scores, agent)[self._reward]

    def _text(self, agent: str) -> str:
        """The prompt of `agent`; without the power's part if it has nothing to order."""
        assert self._board is not None
        if agent not in self._texts:
            shared = self._board.once(_shared_text)
            choices = self._choices.get(agent)
            self._texts[agent] = shared if choices is None else shared + power_text(choices.legal, self._board, PROMPTS)
        return self._texts[agent]


def _complete(choices: UnitChoices) -> Sequence[str]:
    return choices.legal.completed(choices.orders) or () if len(choices.orders) < choices.legal.picks else choices.orders


def _shared_text(board: Board) -> str:
    return rules_text(PROMPTS) + board_text(board, "", PROMPTS)


@lru_cache(maxsize=1)
def _first_board() -> Board:
    board = Board.start()
    board.legal_orders()
    return board
