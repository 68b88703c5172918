"""Chat templates in the manner of well-known models, and folders of a small model with one of them."""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|begin|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<start_of_turn>",
    "<end_of_turn>",
)
"""Special tokens of the templates."""

_QWEN_TURNS = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
QWEN = (
    _QWEN_TURNS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""System and user parts; a model that may think is told not to by an empty thought."""
LLAMA = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if loop.first and strftime_now is defined %}{{- 'Today: ' + strftime_now('%d %b %Y') + '\\n\\n' }}{%- endif %}"
    "{{- m.content | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
"""It writes the beginning of the sequence and the date, and trims."""
MISTRAL = (
    "{{- bos_token }}{%- set kept = namespace(system='') %}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{%- set kept.system = m.content + '\\n\\n' %}"
    "{%- elif m.role == 'user' %}{{- '[INST] ' + kept.system + m.content + '[/INST]' }}"
    "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
"""The rules begin the user's part, and the mark at its end is the generation prompt."""
GEMMA = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- for m in messages %}{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{- m.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
"""There is no system part."""
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<|start_header_id|>' + m.content }}{% else %}{{ '<|end_header_id|>' + m.content.split('</think>')[-1] + eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|end_header_id|><think>\\n' }}{% endif %}"
)
"""It opens a thought, whatever it is asked for."""
QWEN_3_5 = (
    _QWEN_TURNS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    + "{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
"""It opens a thought, and closes it if none is asked for."""
TEMPLATES = {"r1": R1, "qwen 3.5": QWEN_3_5, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA}
NO_SYSTEM = QWEN.replace("{{ '<|im_start|>' + m.role", "{{ '' if m.role == 'system' else '<|im_start|>' + m.role")
NO_GENERATION_PROMPT = _QWEN_TURNS


def chat_model(model: Path, folder: Path, template: str) -> Path:
    """A copy of the small `model` whose tokenizer and config have this chat template and the marks; its weights do not."""
    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    named = {"eos_token": "<|end|>", "bos_token": "<|begin|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named).save_pretrained(str(folder))
    set_config(folder, vocab_size=tokenizer.get_vocab_size())
    return folder


def set_config(folder: Path, file: str = "config.json", **values: object) -> None:
    """Change values in a JSON file of a model, which is made if it is not there; None removes one."""
    before = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    after = {name: value for name, value in (before | values).items() if value is not None}
    (folder / file).write_text(json.dumps(after))
