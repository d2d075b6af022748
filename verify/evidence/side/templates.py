"""Renders conversations with chat templates in the sandbox of transformers, as a program; only the templates run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ckptkit.core.errors import words_of
from ckptkit.verify.witnesses.process.exit_report import ExitReport, run_job
from ckptkit.verify.witnesses.runner import ask

_LIMIT_S = 60
_REFUSED = "refused by"
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2 + 2?\n"}
_ANSWER = {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\nIt is 4."}
_REASONED = {"role": "assistant", "reasoning_content": "2 and 2", "thinking": "2 and 2", "content": "It is 4."}
_TOOLS: list[Mapping[str, Any]] = [
    {"role": "user", "content": "How is Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"sky": "clear"}'},
]
_PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
CONVERSATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "a question": [_USER],
    "a system message and a question": [_SYSTEM, _USER],
    "several turns": [_SYSTEM, _USER, _ANSWER, _USER, _ANSWER, _USER],
    "an answer at the end": [_USER, _ANSWER],
    "separate reasoning": [_USER, _REASONED, _USER],
    "a call of a tool": _TOOLS,
    "a call of a tool, its answer and a question": [_SYSTEM, *_TOOLS, _ANSWER, _USER],
    "two calls of tools": [*_TOOLS[:2], _TOOLS[2], _TOOLS[2]],
    "an image": [_PARTS],
}
# Arguments of callers. Source: the templates of Qwen3, DeepSeek-V3.1 and gpt-oss.
SETTINGS: Sequence[Mapping[str, Any]] = (
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
    {"add_generation_prompt": True, "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
)


@dataclass(frozen=True)
class TemplateJob:
    """Templates, and their special tokens (`bos_token`)."""

    templates: Sequence[str]
    tokens: Mapping[str, str]
    report: str = ""


@dataclass(frozen=True)
class RenderedTemplates:
    """The text of each conversation by each template, or the reason why the template refuses it."""

    texts: Sequence[Sequence[str]]
    names: Sequence[str]  # of the conversations


def is_refusal(text: str) -> bool:
    """Whether a template refused the conversation, for any reason."""
    return text.startswith(_REFUSED)


def render_templates(templates: Sequence[str], tokens: Mapping[str, str]) -> RenderedTemplates | None:
    """Renders with transformers, or None if it is not installed. Raises CannotCheck without an answer."""
    if find_spec("transformers") is None or find_spec("jinja2") is None:
        return None
    answer = ask(TemplateJob(templates, tokens), __name__, RenderedTemplates, _LIMIT_S)
    return answer.require("transformers did not render the chat templates, which are stored in two texts")


def run(job: TemplateJob, phases: ExitReport) -> RenderedTemplates:
    """Renders every conversation with every setting, with and without a tool."""
    cases = [
        (f"{name}{' with a tool' if tools else ''}", list(messages), tools, settings)
        for name, messages in CONVERSATIONS.items()
        for tools in (None, [_TOOL])
        for settings in SETTINGS
        if name != "an image" or any("image" in template for template in job.templates)
    ]
    texts = [
        [_render(template, messages, tools, {**job.tokens, **settings}) for _, messages, tools, settings in cases]
        for template in job.templates
    ]
    return RenderedTemplates(texts, [name for name, *_ in cases])


def _render(template: str, messages: list[Any], tools: Any, settings: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, **settings)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"{_REFUSED} {words_of(error, with_class=True)}"
    return str(texts[0])


if __name__ == "__main__":
    run_job(TemplateJob, run)
