"""A vLLM engine of several processes behind a line protocol, for tests about processes.

Run as a module: settings as JSON in the first line of standard input, then one command a line: ``{"ask": [prompt, ...],
"max_tokens": n}``, ``{"reset": true}`` or ``{"guesses": true}``; one JSON answer a line on standard output.
:class:`EngineProcess` is the test's end of it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from tests.kit.line_process import LineProcess
from tests.kit.module_process import module_command, module_environment
from tests.kit.vllm.starting import import_vllm, processes_are_forked

IN_ONE_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Environment of an engine that is to be another process than the test's, no more: without it there are three, the
frontend, the engine core and the worker. Such an engine's answer is out when its stores are committed."""


class EngineProcess(LineProcess):
    """An engine in a process of its own, with vLLM's usual engine core and worker processes below it."""

    def __init__(self, model: Path, connector: dict[str, Any], log: Path, **options: Any) -> None:
        environment = module_environment(
            OMP_NUM_THREADS="1",  # or none of its processes could be forked
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            TORCH_COMPILE_DISABLE="1",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        environment |= options.pop("environment", {})
        command = ["nice", "-n", str(options.pop("niceness", 0)), *module_command(__name__)]
        settings = {"model": str(model), "connector": connector, "role": options.pop("role", "kv_both")}
        self._unread = 0
        super().__init__(command, log, environment, settings | {"options": options})

    def ask(self, *prompts: list[int], max_tokens: int = 8) -> list[dict[str, Any]]:
        """Answers: ``tokens``, ``logprobs``, ``cached_tokens``, ``finish_reason``, ``kv_transfer_params``."""
        self._say({"ask": prompts, "max_tokens": max_tokens})
        answers: list[dict[str, Any]] = self._hear()
        return answers

    def send(self, *prompts: list[int], max_tokens: int = 8) -> None:
        """Ask without waiting; :meth:`receive` gives the answers."""
        self._say({"ask": prompts, "max_tokens": max_tokens})
        self._unread += 1

    def receive(self) -> list[dict[str, Any]]:
        """Answers to what was sent."""
        answers: list[dict[str, Any]] = self._hear()
        self._unread -= 1
        return answers

    def discard(self) -> None:
        """Wait for the answers nobody received, which would be taken for those of the next question."""
        while self._unread:
            self.receive()

    def reset(self) -> bool:
        """Empty the GPU's prefix cache."""
        self._say({"reset": True})
        return bool(self._hear())

    def guesses(self) -> list[int]:
        """Right guesses and all guesses of a draft so far; needs ``disable_log_stats=False``."""
        self._say({"guesses": True})
        counts: list[int] = self._hear()
        return counts


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its own things to standard output
    settings = json.loads(sys.stdin.readline())
    llm = _start(settings)
    _tell(answers, {"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        (act,) = (ACTS[word] for word in command if word in ACTS)
        _tell(answers, act(llm, command))
    llm.llm_engine.engine_core.shutdown()


def _tell(answers: TextIO, message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _start(settings: dict[str, Any]) -> Any:
    import_vllm()
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = {
        "skip_tokenizer_init": True,
        "block_size": 32,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",  # whatever the processor: as harness.py has it
        "max_model_len": 4096,
        "max_num_seqs": 16,
        "max_logprobs": 5,
        "kv_cache_memory_bytes": 256 * 1024 * 1024,  # filled with zeros at every start: as harness.py has it, too
    }
    name = "OffloadingConnector" if "spec_name" in settings["connector"] else "TieredKVConnector"
    transfer = KVTransferConfig(  # by the plugin's name alone, as users write it
        kv_connector=name, kv_role=settings["role"], kv_connector_extra_config=settings["connector"]
    )
    with processes_are_forked():
        return LLM(model=settings["model"], kv_transfer_config=transfer, **(options | settings["options"]))


def _ask(llm: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=command["max_tokens"], ignore_eos=True, detokenize=False, logprobs=2
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in command["ask"]]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        from tests.kit.vllm.harness import drain  # sets the environment of engines in the test's own process

        drain(llm)  # nothing else steps the engine until the next question
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [sorted((c.logprob for c in at.values()), reverse=True) for at in output.outputs[0].logprobs],
            "cached_tokens": output.num_cached_tokens or 0,
            "finish_reason": output.outputs[0].finish_reason,
            "kv_transfer_params": output.kv_transfer_params,
        }
        for output in outputs
    ]


def _reset(llm: Any, command: dict[str, Any]) -> bool:
    return bool(llm.reset_prefix_cache())


def _guesses(llm: Any, command: dict[str, Any]) -> list[int]:
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [int(counts[f"vllm:spec_decode_num_{name}_tokens"]) for name in ("accepted", "draft")]


ACTS = {"ask": _ask, "reset": _reset, "guesses": _guesses}

if __name__ == "__main__":
    _main()
