"""Runs vLLM's V2 sampler on a CPU, under our legal mask, and compares what it draws with an oracle in float64.

    python -m scripts.check_gpu.kernels

On a CPU build vLLM puts placeholders in the place of Triton; here the real Triton is loaded, with its interpreter. Sampler,
request states, buffers and kernels are vLLM's own. The batch is made by hand, and logits are random: no model runs. What
compiles on a card may still differ: speed, and the rounding of `exp` and `log`, are unmeasured.
"""

import os
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

VOCABULARY, SEATS, LENGTH = 2500, 5, 64
"""Three blocks of vLLM's kernel, the last one not full; request slots; largest number of tokens."""
LOGPROB_BOUND = 1e-5
"""Largest difference of a log-probability from float64, in nats; rounding to float32 alone gives 1e-6."""
CHI_SQUARE_BOUND = 23.5
"""The 99.99 % quantile of the chi-square distribution with 4 degrees of freedom."""
DRAWS = 800


def load_real_triton() -> None:
    """Make vLLM use Triton's interpreter; must run before vLLM is imported.

    `vllm.triton_utils` takes a placeholder where `importing.HAS_TRITON` is false, which on a CPU it always is, and no setting
    changes that. So the module that decides is put in place beforehand.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    decided: Any = types.ModuleType("vllm.triton_utils.importing")
    decided.HAS_TRITON, decided.TritonPlaceholder, decided.TritonLanguagePlaceholder = True, object, object
    sys.modules[decided.__name__] = decided


@dataclass(eq=False)
class Request:
    """A request, and the token sequences of which it may draw one; None: any token."""

    number: int
    sequences: Sequence[tuple[int, ...]] | None
    temperature: float
    drawn: list[int] = field(default_factory=list)
    slot: int = -1

    prompt = (7, 8, 9)

    def may_follow(self) -> list[int]:
        """Tokens that continue a sequence, rising."""
        if self.sequences is None:
            return [*range(VOCABULARY)]
        length = len(self.drawn)
        return sorted({each[length] for each in self.sequences if len(each) > length and [*each[:length]] == self.drawn})

    @property
    def ended(self) -> bool:
        """Whether nothing is left to draw."""
        return len(self.drawn) == 6 if self.sequences is None else tuple(self.drawn) in self.sequences


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run drew."""

    sequences: dict[int, tuple[int, ...]]
    """By the request's number."""
    illegal: int
    largest_error: float
    """Of a log-probability, nats."""
    refused_by_processor: int
    """Tokens that our processor itself found outside their table."""


def table_of(sequences: Sequence[tuple[int, ...]]) -> bytes:
    """The legal table of some token sequences, as a tree."""
    import numpy as np

    from decoding.legal_table import END, LegalTable

    nodes = sorted({each[:length] for each in sequences for length in range(len(each))}, key=lambda node: (len(node), node))
    offsets, tokens, following = [0], [], []
    for node in nodes:
        for token in sorted({each[len(node)] for each in sequences if each[: len(node)] == node and len(each) > len(node)}):
            tokens.append(token)
            following.append(END if (*node, token) in sequences else nodes.index((*node, token)))
        offsets.append(len(tokens))
    longest = max(map(len, sequences))
    return LegalTable(
        offsets=np.array(offsets, np.int32),
        token_ids=np.array(tokens, np.int32),
        next_nodes=np.array(following, np.int32),
        longest=longest,
    ).to_bytes()


class Runner:
    """The part of vLLM's V2 runner that samples, without a model."""

    def __init__(self) -> None:
        import torch
        from vllm.v1.worker.gpu import buffer_utils

        buffer_utils.__dict__["is_uva_available"] = lambda: False  # pinned memory needs a driver
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        from inference.legal_processor_v2 import LegalOrderProcessorV2

        config: Any = SimpleNamespace(speculative_config=None, reasoning_config=None)
        self._states = RequestState(SEATS, LENGTH, LENGTH * SEATS, 0, VOCABULARY, torch.device("cpu"))
        self.processor = LegalOrderProcessorV2(config, LogitsProcRequestState.from_request_state(self._states))
        self._sampler = Sampler(
            config,
            SEATS,
            VOCABULARY,
            torch.device("cpu"),
            self._states,
            logprobs_mode="processed_logprobs",
            custom_logits_processors=[self.processor],
        )

    def add(self, request: Request) -> None:
        """Take a request into a free slot."""
        from vllm import SamplingParams

        from inference.legal_admission import TABLE_KEY

        extra = None if request.sequences is None else {TABLE_KEY: table_of(request.sequences)}
        self._states.add_request(str(request.number), len(request.prompt), [*request.prompt], 0, LENGTH)
        request.slot = self._states.req_id_to_index[str(request.number)]
        self._sampler.add_request(
            request.slot,
            SamplingParams(
                temperature=request.temperature,
                seed=1000 + request.number,
                logprobs=0,
                max_tokens=9,
                detokenize=False,
                extra_args=extra,
            ),
        )

    def remove(self, request: Request) -> None:
        """Free its slot; nobody tells the processor."""
        self._states.remove_request(str(request.number))

    def step(self, requests: Sequence[Request], logits: Any) -> tuple[list[int], list[float]]:
        """Draw a token for each request from its row of `logits` [requests, vocabulary]; returns tokens and log-probabilities."""
        import numpy as np
        import torch
        from vllm.v1.worker.gpu.input_batch import post_update

        self._states.apply_staged_writes()
        self._sampler.apply_staged_writes()
        count = len(requests)
        slots = np.array([each.slot for each in requests], np.int32)
        lengths = np.array([len(each.prompt) + len(each.drawn) for each in requests], np.int32)
        mapping = torch.from_numpy(slots.copy())
        batch: Any = SimpleNamespace(
            num_reqs=count,
            idx_mapping=mapping,
            idx_mapping_np=slots,
            expanded_idx_mapping=mapping,
            expanded_local_pos=torch.zeros(count, dtype=torch.int32),
            cu_num_logits=torch.arange(count + 1, dtype=torch.int32),
            cu_num_logits_np=np.arange(count + 1, dtype=np.int32),
            positions=torch.from_numpy(lengths - 1).long(),
            input_ids=torch.tensor([[*each.prompt, *each.drawn][-1] for each in requests], dtype=torch.int32),
            logits_indices=torch.arange(count),
            seq_lens=torch.from_numpy(lengths.copy()),
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths.copy()),
        )
        output = self._sampler(logits, batch)
        post_update(
            mapping,
            self._states.num_computed_tokens.gpu,
            self._states.last_sampled_tokens,
            None,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            None,
            self._states.all_token_ids.gpu,
            self._states.total_len.gpu,
        )
        assert output.logprobs_tensors is not None
        return output.sampled_token_ids[:, 0].tolist(), output.logprobs_tensors.logprobs[:, 0].tolist()


def made_requests() -> list[Request]:
    """Requests of every kind: with tables of branching and of forced tokens, at two temperatures, and one without a table."""
    dice, requests = random.Random(0), []
    for number in range(9):
        heads = [dice.sample(range(20, VOCABULARY), 3) for _ in range(3)]
        sequences = sorted({(heads[0][0], heads[1][a], heads[2][b], VOCABULARY - 1) for a in range(3) for b in range(3)})
        requests.append(Request(number, None if number == 4 else sequences[: number + 1], 0.7 if number % 3 == 2 else 1.0))
    return requests


def logits_of(request: Request) -> Any:
    """A row of logits that follows from the request and its position alone."""
    import torch

    noise = torch.Generator().manual_seed(97 * request.number + len(request.drawn))
    return 4 * torch.randn(VOCABULARY, generator=noise)


def draw_all(order: int) -> Outcome:
    """Draw all requests; `order`: seed of the rows' order and of who comes when."""
    import torch

    runner, waiting, dice = Runner(), made_requests(), random.Random(order)
    dice.shuffle(waiting)
    running: list[Request] = []
    sequences, illegal, largest = {}, 0, 0.0
    while waiting or running:
        while waiting and len(running) < SEATS:
            running.append(waiting.pop())
            runner.add(running[-1])
        dice.shuffle(running)
        logits = torch.stack([logits_of(each) for each in running])
        for row, (token, logprob) in enumerate(zip(*runner.step(running, logits.clone()), strict=True)):
            legal = running[row].may_follow()
            illegal += token not in legal
            if token in legal:
                exact = torch.log_softmax(logits[row, legal].double() / running[row].temperature, 0)[legal.index(token)]
                largest = max(largest, abs(logprob - float(exact)))
            running[row].drawn.append(token)
        for each in [each for each in running if each.ended or len(each.drawn) > 6]:
            runner.remove(each)
            running.remove(each)
            sequences[each.number] = tuple(each.drawn)
    return Outcome(sequences, illegal, largest, runner.processor.illegal_tokens)


def chi_square() -> float:
    """Chi-square statistic of vLLM's draws from five legal ids, against their probabilities; each draw has its own seed."""
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    legal, row = [1, 4, 5, 9, 15], torch.full((16,), -torch.inf)
    row[legal] = torch.tensor([0.0, 1.0, -0.5, 0.3, 0.8])
    drawn = gumbel_sample(
        row.expand(DRAWS, 16).contiguous(),
        torch.arange(DRAWS, dtype=torch.int32),
        torch.ones(DRAWS),
        torch.arange(DRAWS) * 7919,
        torch.full((DRAWS,), 3),
        apply_temperature=False,
        is_drafting=False,
    )
    counts = torch.bincount(drawn, minlength=16).double()
    expected = DRAWS * torch.softmax(row.double(), 0)
    outside = float(counts[[each for each in range(16) if each not in legal]].sum())
    return float("inf") if outside else float(((counts[legal] - expected[legal]) ** 2 / expected[legal]).sum())


def main() -> int:
    """Run the command; returns its exit code."""
    load_real_triton()
    try:
        first, second, spread = draw_all(1), draw_all(2), chi_square()
    except ImportError as error:
        print(f"kernels: not run, because {error}: vLLM and Triton must be installed (make setup)")
        return 0
    largest = max(first.largest_error, second.largest_error)
    wrong = [
        f"{first.illegal + second.illegal} illegal tokens" * bool(first.illegal + second.illegal),
        "our processor counted tokens outside their tables" * bool(first.refused_by_processor + second.refused_by_processor),
        "the order of rows changed what was drawn" * (first.sequences != second.sequences),
        f"a log-probability is wrong by {largest:.1e}" * (largest > LOGPROB_BOUND),
        f"draws do not follow the probabilities (chi-square {spread:.1f})" * (spread > CHI_SQUARE_BOUND),
    ]
    tokens = sum(map(len, first.sequences.values()))
    print(
        f"kernels: vLLM's V2 sampler in Triton's interpreter drew {tokens} tokens under the legal mask twice, "
        f"in two orders of rows; largest error of a log-probability {largest:.1e}; "
        f"chi-square of {DRAWS} draws {spread:.1f} (bound {CHI_SQUARE_BOUND})"
    )
    for each in filter(None, wrong):
        print(f"  {each}")
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
