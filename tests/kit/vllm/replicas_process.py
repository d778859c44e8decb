"""Data-parallel replicas of one model behind a line protocol: a frontend, and an engine core and a worker per replica.

Run as a module: settings as JSON in the first line of standard input, then ``{"ask": prompt, "replica": n}`` a line;
one JSON answer a line on standard output. :class:`Replicas` is the test's end of it.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.kit.line_process import LineProcess
from tests.kit.module_process import module_command, module_environment
from tests.kit.vllm.starting import import_vllm, processes_are_forked


class Replicas(LineProcess):
    """Two replicas in processes of their own."""

    def __init__(self, model: Path, connector: dict[str, Any], log: Path) -> None:
        environment = module_environment(
            OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
        )
        settings = {"model": str(model), "connector": connector}
        super().__init__(module_command(__name__), log, environment, settings)

    def ask(self, replica: int, prompt: list[int]) -> dict[str, Any]:
        """One replica's answer: ``tokens``, ``logprobs``, ``cached_tokens``, ``finish_reason``."""
        self._say({"ask": prompt, "replica": replica})
        answer: dict[str, Any] = self._hear()
        return answer


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its own things to standard output
    settings = json.loads(sys.stdin.readline())

    async def serve() -> None:
        engine = _start(settings)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _ask(engine, json.loads(line))), file=answers, flush=True)
        engine.shutdown()

    asyncio.run(serve())


def _start(settings: dict[str, Any]) -> Any:
    import_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.kit.server.operator_server import transfer

    arguments = AsyncEngineArgs(
        model=settings["model"],
        data_parallel_size=2,
        skip_tokenizer_init=True,
        block_size=32,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=16,
        max_logprobs=5,
        kv_cache_memory_bytes=256 * 1024 * 1024,  # as harness.py has it
        kv_transfer_config=transfer(settings["connector"]),
    )
    with processes_are_forked():
        return AsyncLLM.from_engine_args(arguments)


async def _ask(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2)
    name = f"request-{os.urandom(8).hex()}"
    prompt = {"prompt_token_ids": command["ask"]}
    outputs = engine.generate(prompt, parameters, name, data_parallel_rank=command["replica"])
    last = [output async for output in outputs][-1]
    (completion,) = last.outputs
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [sorted((c.logprob for c in at.values()), reverse=True) for at in completion.logprobs],
        "cached_tokens": last.num_cached_tokens or 0,
        "finish_reason": completion.finish_reason,
    }


if __name__ == "__main__":
    _main()
