"""Rollout files as slime and miles write them, with log-probabilities by transformers' own forward pass."""

import json
import re
from copy import deepcopy
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

PROMPT, RESPONSE, COUNT = 12, 24, 4  # tokens of a prompt, of a response, and samples
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
BYTES = {character: 4 + place for place, character in enumerate(sorted(ByteLevel.alphabet()))}  # ASCII is itself
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<bos>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}A{% if enable_thinking is defined and not enable_thinking %}T{% endif %}{% endif %}"
)


_FIELDS = {
    **dict.fromkeys(("group_index", "index", "rollout_id")),
    "prompt": "",
    "tokens": [],
    **dict.fromkeys(("multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id")),
    "apply_chat_template_kwargs": {},
    "response": "",
    "response_length": 0,
    **dict.fromkeys(("label", "reward", "loss_mask")),
    "weight_versions": [],
    **dict.fromkeys(("rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")),
    "rollout_routed_experts": None,
    "remove_sample": False,
    "teacher_log_probs": None,
    "status": "completed",
    "metadata": {},
    **dict.fromkeys(("generate_function_path", "custom_rm_path", "train_metadata", "session_id")),
    "non_generation_time": 0.0,
    "spec_info": {"spec_accept_token_num": 0, "spec_verify_ct": 0},
    "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 12},
}


class Sample(SimpleNamespace):
    """A prompt with a response, with the fields of slime/utils/types.py in their order."""

    def __init__(self, **fields):
        super().__init__(**deepcopy(_FIELDS) | fields)

    def to_dict(self):
        return self.__dict__.copy()


def write(path, samples, **more):
    torch.save({"rollout_id": 7, "samples": [one.to_dict() for one in samples], **more}, path)
    return path


def model(path, dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def tokens_of(path):
    """Prompts of random letters, with responses of any tokens that the model samples."""
    sampler = torch.Generator().manual_seed(0)
    tokens = torch.randint(BYTES["a"], BYTES["z"] + 1, (COUNT, PROMPT), generator=sampler)
    network = model(path, torch.bfloat16)
    with torch.no_grad():
        for _ in range(RESPONSE):
            probabilities = network(tokens).logits[:, -1].float().softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=sampler)], 1)
    return tokens.tolist()


def log_probs_of(path, tokens, temperature=1.0):
    """Of every token but the first, in bfloat16 as an engine would compute them."""
    every = torch.tensor(tokens)
    with torch.no_grad():
        logits = model(path, torch.bfloat16)(every).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, every[:, 1:, None])[..., 0].tolist()


def samples(tokens, log_probs, **fields):
    """What a rollout of text prompts records; `log_probs` as `log_probs_of` gives them."""
    return [
        Sample(
            index=index,
            group_index=index // 2,
            prompt=text_of(ids[:PROMPT]),
            tokens=list(ids),
            response_length=RESPONSE,
            reward=1.0,
            rollout_log_probs=list(given[PROMPT - 1 :]),
            **{"weight_versions": ["3"], **fields},
        )
        for index, (ids, given) in enumerate(zip(tokens, log_probs, strict=True))
    ]


def text_of(ids):
    letters = {number: character for character, number in BYTES.items()} | dict(enumerate(SPECIAL))
    return "".join(letters[one] for one in ids)


def ids_of(text):
    """The tokens of printable ASCII without blanks, in which `<bos>` and `<eos>` may stand."""
    return [SPECIAL.index(one) if one in SPECIAL else BYTES[one] for one in re.findall(r"<bos>|<eos>|.", text)]


def add_tokenizer(path):
    vocabulary = {token: number for number, token in enumerate(SPECIAL)} | BYTES
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<eos>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(TEMPLATE)
