"""vLLM's own structured outputs: `python -m benchmarks.peers.programs.structured_outputs`."""

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from benchmarks.peers.programs.answer import serve


class Drawing:
    """The engine, after `start`."""

    def start(self, arguments: Any) -> Mapping[str, Any]:
        """Start the engine."""
        torch.set_num_threads(1)
        self._engine = LLM(**arguments, disable_log_stats=True)
        return {}

    def draw(self, given: Any) -> Mapping[str, Any]:
        """Draw one completion for each request; answers CPU seconds, the texts, and the number of tokens."""
        prompts = [TokensPrompt(prompt_token_ids=each["prompt_ids"]) for each in given]
        parameters = [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                seed=each["seed"],
                max_tokens=each["max_tokens"],
                logprobs=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
                structured_outputs=StructuredOutputsParams(grammar=each["grammar"]),
            )
            for each in given
        ]
        self._engine.reset_prefix_cache()
        gc.collect()
        began = time.process_time()
        outputs = self._engine.generate(prompts, parameters, use_tqdm=False)
        spent = time.process_time() - began
        drawn = [output.outputs[0] for output in outputs]
        return {"cpu_s": spent, "texts": [each.text for each in drawn], "tokens": sum(len(each.token_ids) for each in drawn)}


if __name__ == "__main__":
    program = Drawing()
    serve({"start": program.start, "draw": program.draw})
