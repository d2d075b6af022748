"""Model arguments that Python files give: the words that Python prints, though none of them is run."""

import pytest
from support.miles_checkout import MODELS, TOOL, printed, write_checkout

from ckptkit.verify.launch.python.model_args import model_arguments
from ckptkit.verify.launch.python.values import Text, Unknown
from ckptkit.verify.launch.shell.read import read_script

VARIABLES = [{}, {"MODEL_ARGS_NUM_LAYERS": "5", "MODEL_ARGS_ROTARY_BASE": "5000000"}, {"MODEL_ARGS_NUM_LAYERS": ""}]


@pytest.mark.parametrize("environment", VARIABLES)
@pytest.mark.parametrize("name", MODELS)
def test_arguments_are_those_that_python_prints(name, environment, tmp_path):
    tool = write_checkout(tmp_path)
    assert model_arguments(tool, name, environment) == printed(tmp_path, tool, [name], environment)


@pytest.mark.parametrize(
    ("before", "layers"), [("", "61"), ("export MODEL_ARGS_NUM_LAYERS=7\n", "7"), ("MODEL_ARGS_NUM_LAYERS=7\n", "61")]
)
def test_bash_script_gets_the_arguments_of_its_model(before, layers, tmp_path):
    write_checkout(tmp_path)
    script = tmp_path / "run.sh"
    script.write_text(
        f'{before}LINE="$(python3 "{tmp_path}/{TOOL}" "moe")" || exit 1\nread -ra MODEL_ARGS <<< "${{LINE}}"\n'
        "python3 train.py --hf-checkpoint /x ${MODEL_ARGS[@]}\n"
    )
    read = read_script(script, environment={})
    words = [word.text for word in read.words]
    assert (read.unresolved, words[words.index("--num-layers") + 1]) == ((), layers)
    assert words[words.index("--moe-layer-freq") + 1] == f"[{','.join(['0'] * 3 + ['1'] * (int(layers) - 3))}]"


UNKNOWN = {
    "a module of another": "import torch\ndef model_args():\n    return f'--num-layers {torch.cuda.device_count()}'\n",
    "a condition": "import torch\ndef model_args():\n    return '--num-layers 2' if torch.x else '--num-layers 3'\n",
    "no text": "def model_args():\n    return 3\n",
    "itself": (
        "from model_args_utils import load_sibling_model_args\n"
        "def model_args():\n    return load_sibling_model_args(__file__, 'odd')\n"
    ),
    "an endless loop": "def model_args():\n    text = ''\n    while True:\n        text += 'x'\n    return text\n",
    "a loop over many": "def model_args():\n    return ' '.join(str(one) for one in range(10 ** 9))\n",
    "a huge number": "N = 9\nfor _ in range(9000):\n    N = N * N\ndef model_args():\n    return f'--num-layers {N}'\n",
    "replacing": (
        "T = 'a' * 9000\nfor _ in range(9):\n    T = T.replace('a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa')\n"
        "def model_args():\n    return T\n"
    ),
    "a sum of many": f"def model_args():\n    return {'1 + ' * 5000}1\n",
    "a pattern that takes for ever": (
        "import re\ndef model_args():\n    return '--x' if re.search('(a+)+$', 'a' * 99 + 'b') else '--y'\n"
    ),
    "no Python": "def model_args(:\n",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_data_is_not_known(name, tmp_path):
    """Nothing is run: no module is imported, no file is opened, and a file made to hang is given up."""
    tool = write_checkout(tmp_path)
    (tmp_path / "scripts" / "models" / "odd.py").write_text(UNKNOWN[name])
    assert isinstance(model_arguments(tool, "odd", {}), Text | Unknown)
    script = tmp_path / "run.sh"
    script.write_text(f'read -ra MODEL_ARGS <<< "$(python3 {tool} odd)"\npython3 train.py ${{MODEL_ARGS[@]}}\n')
    assert read_script(script, environment={}).unresolved


def test_model_that_is_not_there_is_not_known(tmp_path):
    found = model_arguments(write_checkout(tmp_path), "nosuch", {})
    assert "nosuch.py: No such file" in found.why
