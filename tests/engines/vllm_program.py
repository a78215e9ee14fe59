"""The process of a real vLLM for tests: one JSON request a line on stdin, one answer on stdout.

Runs in vLLM's own virtual environment (`vllm_engine.py` starts it); the first line is LLM's
options, and its answer comes when the engine is ready. What vLLM prints goes to stderr.
"""

import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any


def take_pipes() -> tuple[Any, Any]:
    """Return stdin and stdout, out of reach of vLLM's log and of its processes."""
    requests, answers = os.dup(0), os.dup(1)
    with open(os.devnull) as nothing:  # noqa: PTH123 -- a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return os.fdopen(requests), os.fdopen(answers, "w", buffering=1)


def generate(
    llm: Any,
    prompts: list[dict[str, Any]],
    sampling: list[dict[str, Any]],
    lora: tuple[str, int, str] | None = None,
) -> Any:
    """Run prompts; `lora` is the name, number and directory of their adapter.

    The `image` of a prompt is a file.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    fixed = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**fixed | one) for one in sampling]
    named = LoRARequest(*lora) if lora else None
    seen = [with_image(**one) for one in prompts]
    answers = llm.generate(seen, params, use_tqdm=False, lora_request=named)
    return [said(answer) for answer in answers]


def with_image(image: str = "", **prompt: Any) -> dict[str, Any]:
    from PIL import Image

    return prompt | ({"multi_modal_data": {"image": Image.open(image)}} if image else {})


def said(answer: Any) -> dict[str, Any]:
    return {
        "tokens": list(answer.outputs[0].token_ids),
        "cached": answer.num_cached_tokens,
        "ttft_s": answer.metrics.first_token_latency,
        "finish": answer.outputs[0].finish_reason,
        "told": (answer.kv_transfer_params or {}).get("tierkv"),
    }


def log_probabilities(llm: Any, prompts: list[dict[str, Any]], vocabulary: int, path: str) -> None:
    """Save what follows each prompt, float32 [prompt, token]; needs the option max_logprobs=-1."""
    import numpy as np
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
    found = np.full((len(prompts), vocabulary), -np.inf, np.float32)
    for row, answer in zip(found, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for token, one in answer.outputs[0].logprobs[0].items():
            row[token] = one.logprob
    np.save(path, found)


def generate_with_aborts(
    llm: Any,
    prompts: list[dict[str, Any]],
    sampling: dict[str, Any],
    aborted: list[int],
    after_s: float,
) -> Any:
    """Run prompts at once and abort some of them; those have no answer."""
    from vllm import SamplingParams

    engine, answers = llm.llm_engine, dict[str, Any]()
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
    names = [engine.add_request(str(at), one, params.clone()) for at, one in enumerate(prompts)]
    time.sleep(after_s)  # the engine's core runs in a process of its own, and has begun
    engine.abort_request([names[at] for at in aborted], internal=True)
    while engine.has_unfinished_requests():
        answers.update({one.request_id: said(one) for one in engine.step() if one.finished})
    return [None if at in aborted else answers[str(at)] for at in range(len(prompts))]


def metrics(llm: Any, prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        labels = {name: text for name, text in metric.labels.items() if name not in SAME_FOR_ALL}
        more = ",".join(f"{name}={text}" for name, text in sorted(labels.items()))
        if metric.name.startswith(prefix) and hasattr(metric, "value"):
            found[f"{metric.name}{{{more}}}" if more else metric.name] = metric.value
    return found


HEARD: list[Any] = []
"""The subscriber of the engine's events, once there is one."""


def subscribe(endpoint: str) -> None:
    """Follow the events that vLLM publishes, as a router would."""
    import zmq

    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(endpoint)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
    HEARD.append(subscriber)


def events(llm: Any) -> list[dict[str, Any]]:
    """Return what was published since the last call; hashes are hex."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    del llm
    found = []
    while HEARD[0].poll(500):
        *_, payload = HEARD[0].recv_multipart()
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            for name in ("block_hashes", "parent_block_hash"):
                fields[name] = repr(fields.get(name))
            fields.pop("extra_keys", None)
            found.append({"type": type(event).__name__, **fields})
    return found


SAME_FOR_ALL = ("engine", "model_name")
ACTIONS: dict[str, Callable[..., Any]] = {
    "generate": generate,
    "generate_with_aborts": generate_with_aborts,
    "log_probabilities": log_probabilities,
    "metrics": metrics,
    "events": events,
    "reload_weights": lambda llm: llm.collective_rpc("reload_weights"),
    "sleep": lambda llm, level: llm.sleep(level),
    "wake_up": lambda llm: llm.wake_up(),
    "reset_prefix_cache": lambda llm, **options: llm.reset_prefix_cache(**options),
}


def main() -> None:
    requests, answers = take_pipes()
    llm: Any = None
    for line in requests:
        request = json.loads(line)
        action = request.pop("do")
        try:
            if action == "start":
                from vllm import LLM
                from vllm.config import KVEventsConfig

                if published := request.get("kv_events_config"):
                    request["kv_events_config"] = KVEventsConfig(**published)
                    subscribe(published["endpoint"])
                llm, result = LLM(**request), None
            else:
                result = ACTIONS[action](llm, **request)
        except Exception:  # noqa: BLE001 -- the test gets it, whatever it is
            traceback.print_exc()
            answers.write(json.dumps({"error": traceback.format_exc(limit=-3)}) + "\n")
        else:
            answers.write(json.dumps({"result": result}) + "\n")


if __name__ == "__main__":
    main()
