"""Renders recorded messages as SGLang's chat endpoint does: `python -m verify.witnesses.rollouts.sglang_template JOB`.

SGLang's own handler of chat requests turns them into tokens; it is given a tokenizer and settings, and neither a server
nor a GPU. Written for SGLang 0.5.16, which is imported inside the functions alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckptkit.core.errors import words_of
from ckptkit.formats.hf.reader import read_json
from verify.witnesses.process.entry import run_job
from verify.witnesses.process.exit_report import Phase, PhaseLog
from verify.witnesses.rollouts.job import Prompt, PromptJob, Rendering, Renderings
from verify.witnesses.rollouts.template import difference


def run(job: PromptJob, phases: PhaseLog) -> Renderings:
    """Renders every prompt, each of messages. Raises whatever SGLang raises but for what its endpoint refuses."""
    phases.enter(Phase("starting SGLang's chat handler"))
    handler, tokenizer = _handler(Path(job.home))
    phases.enter(Phase("rendering prompts in SGLang"))
    return Renderings([_rendering(handler, tokenizer, one) for one in job.prompts])


def _handler(home: Path) -> tuple[Any, Any]:
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.template_manager import TemplateManager
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    config = read_json(home / "config.json")
    tokenizer = get_tokenizer(str(home), trust_remote_code=False)
    names = {"architectures": config.get("architectures"), "model_type": config.get("model_type")}
    manager = SimpleNamespace(
        tokenizer=tokenizer,
        processor=None,
        server_args=SimpleNamespace(
            tool_call_parser=None,
            reasoning_parser=None,
            default_chat_template_kwargs=None,
            served_model_name=str(home),
        ),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**names), get_default_sampling_params=dict),
    )
    templates = TemplateManager()
    templates.load_chat_template(manager, None, str(home))
    return OpenAIServingChat(manager, templates), tokenizer


def _rendering(handler: Any, tokenizer: Any, asked: Prompt) -> Rendering:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    options = dict(asked.options)
    tools = options.pop("tools", None)
    request: Mapping[str, Any] = {"model": "", "messages": asked.prompt, "chat_template_kwargs": options or None}
    try:
        found = handler._process_messages(ChatCompletionRequest(**request, tools=tools), False)
    except ValueError as error:  # what the endpoint answers with 400
        return Rendering(asked.index, refused=words_of(error))
    rendered = [*found.prompt_ids]
    return Rendering(asked.index) if rendered == [*asked.tokens] else difference(tokenizer, asked, rendered)


if __name__ == "__main__":
    run_job(PromptJob, run)
