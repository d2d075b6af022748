"""Updates of real `vllm.LLM`s, each checked: `python -m support.sync_vllm OUT STAGES PATH`.

OUT gets a JSON line a check: its step, and what the check said. With several STAGES the last one has an output layer of
its own, which the trainer's tied embeddings are. `outcomes` starts this, a process a model.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ckptkit.hooks import WeightSyncCheck
from support.processes import end_now, run_logged
from support.sync_faults import LAYER, SLEEP, checked, lost, outcome, tensors_of, weights
from support.vllm_logits import ON_GPU, prepare_vllm

HEAD = "lm_head.weight"
# Packed weights are laid out anew by vLLM's layerwise reload alone.
WAYS = {"int4": ("load_by_layer",)}
EVERY_WAY = ("load_by_layer", "load_plainly")


def outcomes(root, stages, paths, *, program, gpu=False):
    def run(path):
        out, log = root / f"{path.name}.out", root / f"{path.name}.log"
        out.touch()
        ended = run_logged(log, "support.sync_vllm", out, stages, path, gpu=gpu, limit_s=800, program=program)
        if not ended:
            print(f"== {path.name} ended early\n{log.read_text(errors='replace')[-5000:]}")
        return dict(map(json.loads, out.read_text().splitlines()))

    with ThreadPoolExecutor(len(paths) if gpu else 1) as pool:
        return {step: said for found in pool.map(run, paths) for step, said in found.items()}


def ways(path):
    return WAYS.get(path.name, EVERY_WAY)


class Engine:
    def __init__(self, path, stages):
        import vllm

        on_gpu = {**ON_GPU, "enable_sleep_mode": stages == 1} if torch.cuda.is_available() else {}
        self.path = path
        self.llm = vllm.LLM(
            model=str(path),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=2,
            disable_log_stats=True,
            enable_prefix_caching=False,
            worker_extension_cls="support.vllm_kept.Updated",
            pipeline_parallel_size=stages,
            distributed_executor_backend="mp" if stages > 1 else None,
            **on_gpu,
        )
        self.renew()

    def renew(self):
        self.check = WeightSyncCheck(self.llm.collective_rpc, program="vllm")

    def deliver(self, way, sent):
        self.llm.collective_rpc(way, args=(list(sent.items()),))

    def update(self, sent, *, spoilt=False):
        """One whole update, `spoilt` by a layout that is made once too often."""
        for name, tensor in sent.items():
            self.check.record(name, tensor)
        self.deliver("load_by_layer", sent)
        if spoilt:
            experts = f"model.layers.{LAYER}.mlp.experts.routed_experts"
            self.llm.collective_rpc("exchange", args=(f"{experts}.w13_weight",))
        return outcome(self.check)

    def sleep(self, level):
        """On the CPU, where vLLM does not sleep, the parameters are overwritten, as level 2 leaves them."""
        if torch.cuda.is_available():
            self.llm.sleep(level=level)
            self.llm.wake_up()
        elif level > 1:
            self.llm.collective_rpc("lose")


def of_one_rank(engine):
    """Sound updates, then each fault with a sound one after it, in every way; between them, what sleep leaves."""
    tensors = tensors_of(engine.path)
    first, *others = ways(engine.path)
    yield from in_one_way(engine, first)
    if "moe" in engine.path.name:
        yield "gate and up exchanged", engine.update(weights(tensors, 91), spoilt=True)
        yield "after that", engine.update(weights(tensors, 92))
    yield "resumed", lost(engine.check)
    engine.sleep(1)
    yield "sleep level 1", lost(engine.check)
    engine.sleep(2)
    yield SLEEP, lost(engine.check)
    yield f"after {SLEEP}", engine.update(weights(tensors, 99))
    for way in others:
        yield from in_one_way(engine, way)


def in_one_way(engine, way):
    engine.renew()
    for step, said in checked(engine.check, tensors_of(engine.path), lambda sent, number: engine.deliver(way, sent)):
        yield f"{way}: {step}", said


def of_stages(engine):
    """A trainer whose tied embeddings have one name, and then both."""
    tensors = tensors_of(engine.path)
    one_name = {name: one for name, one in tensors.items() if name != HEAD}
    yield "both names", engine.update(weights(tensors, 1))
    engine.renew()
    yield "one name, the same values", engine.update(weights(one_name, 1))
    yield "one name", engine.update(weights(one_name, 2))


def main():
    prepare_vllm()
    out, stages, path = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    engine = Engine(path, stages)
    with out.open("w") as lines:
        for step, said in of_stages(engine) if stages > 1 else of_one_rank(engine):
            lines.write(json.dumps([f"{path.name}: {step}", said]) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
    end_now()
