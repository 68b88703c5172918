"""Reads a model's tokenizer as `AutoTokenizer` of transformers does.

`AutoTokenizer` imports torch, so its choice of a class is made here; a test compares the two. The class adds named special tokens
that tokenizer.json lacks, and some classes rebuild the tokenizer from its vocabulary. A tokenizer may have been saved with
truncation and padding; they are off here, as in each call of transformers. This module does not encode prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from entente.decoding.architectures import FAMILIES
from entente.decoding.model_files import read_config, read_tokenizer_config
from entente.telemetry.errors import InputError

_STARTED = ("LlamaTokenizer", "GemmaTokenizer")
"""Classes of models that were trained with a start token before each text, unless `add_bos_token` is false. transformers 5 takes
it from tokenizer.json alone, and one that was converted from another format lacks it."""
_ANY_TEXT = "A PAR H"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokenizer:
    """A tokenizer, and what the files beside it say."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    """Text of each named special token, such as `bos_token`, which chat templates refer to."""
    start_ids: tuple[int, ...]
    """Ids put before a text that no chat template writes: the start token, or nothing."""


def read_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer of the model in `folder`.

    Raises:
        InputError: it cannot be read, or does not give back a text that it encoded.
    """
    import transformers

    config, files = read_config(folder), read_tokenizer_config(folder)
    named = str(files.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    name = _class_name(str(config.get("model_type")), named)
    plain = transformers.PreTrainedTokenizerFast
    chosen = getattr(transformers, name, None)
    reader = chosen if isinstance(chosen, type) and issubclass(chosen, plain) else plain
    try:
        found = reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # Its readers raise many unrelated types for a damaged file; all mean the same to the user.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"the tokenizer of model '{folder}' cannot be read ({reason}): copy or download it again") from error
    tokenizer: Tokenizer = found.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode(_ANY_TEXT)
    start_ids = tuple(encoded.ids[: encoded.special_tokens_mask.index(0)]) if 0 in encoded.special_tokens_mask else ()
    if reader is not plain and tokenizer.decode(encoded.ids).strip() != _ANY_TEXT:
        raise InputError(
            f"the tokenizer of model '{folder}' loses letters when it is read as a {name}: set tokenizer_class in its "
            "tokenizer_config.json to 'PreTrainedTokenizerFast', which a qwen2 ignores, or use another model"
        )
    adds_start = files.get("add_bos_token", name in _STARTED or named in _STARTED)
    if not start_ids and found.bos_token_id is not None and adds_start:
        start_ids = (found.bos_token_id,)
    return ModelTokenizer(tokenizer=tokenizer, special_tokens=found.special_tokens_map, start_ids=start_ids)


def _class_name(model_type: str, named: str) -> str:
    """The class that `AutoTokenizer` takes if the files name the class `named`; `PreTrainedTokenizerFast` if there is none of
    this name."""
    family = FAMILIES.get(model_type)
    if family is not None and (family.same_tokenizer or not named):
        return family.tokenizer
    return named
