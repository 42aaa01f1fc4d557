"""The tokenizer in a GGUF file. Each ``tokenizer.*`` key is used, says nothing of texts, or is refused by its name.

A file names the rule by which a text is cut before its merges, and not the rule itself: the rules are llama.cpp's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from draftheads.errors import UnsupportedModel
from draftheads.models.gguf_files import GgufFile
from draftheads.utils.counts import counted
from draftheads.utils.messages import printable, short

if TYPE_CHECKING:  # its import takes a second, and a start from the cache needs none
    from transformers import PreTrainedTokenizerFast

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of GGUF's llama_token_type
_SPACE = "▁"
_TEMPLATE = "tokenizer.chat_template"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = rf"{'|'.join(_CASES)}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{'|'.join(f'{each}{_ENDINGS}?' for each in _CASES)}|\p{{N}}{{1,3}}|{_CASED_REST}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = r"[一-龥ࠀ-一가-퟿]+"
_RULES = {  # names in tokenizer.ggml.pre, and the expressions that cut one after the other
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": (_GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b": (r"\p{N}", _GPT2),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": (_LLAMA3,),
    "dbrx smaug-bpe glm4 chatglm-bpe": (_LLAMA3,),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (_GPT4O,),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "deepseek-v3 hunyuan-dense joyai-llm": (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
}
_SPLITS = {name: rules for names, rules in _RULES.items() for name in names.split()}
_WHOLE_WORDS = {"tekken", *list(_RULES)[2].split()}  # words of the vocabulary need no merges, and texts begin with BOS
_ENDS = {  # tokens that end an answer whatever the file says, as in llama.cpp
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>"),
}
_END_KEYS = ("eos", "eot", "eom", "eog", "fim_pad", "fim_rep", "fim_sep")
# our name of a role: the key's, and the id in files of Llama's kind without the key
_ROLES = {"bos": ("bos", 1), "eos": ("eos", 2), "unk": ("unknown", 0), "pad": ("padding", None)}
_TAKEN = {"model", "pre", "tokens", "token_type", "scores", "merges", "eog_token_ids"}
_TAKEN |= {"add_bos_token", "add_eos_token", "add_space_prefix"}
_TAKEN |= {f"{role}_token_id" for role in (*(name for name, _ in _ROLES.values()), *_END_KEYS)}
# of other tasks: texts in the middle of others, masks, kinds of texts; and the tokenizer once more
_NOTES = {f"{role}_token_id" for role in ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")}
_NOTES |= {f"{role}_token_id" for role in ("seperator", "cls", "mask")} | {"token_type_count", "huggingface.json"}
# values that change no text
_NO_EFFECT = {"add_sep_token": False, "remove_extra_whitespaces": False}


def tokenizer_of(file: GgufFile, most_tokens: int) -> "PreTrainedTokenizerFast":
    """The tokenizer in a file, for texts of so many tokens.

    Raises:
        UnsupportedModel: it is of another kind, or a key is not known or missing.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    get = _checked(file)
    tokens, kind = file.needed("tokenizer.ggml.tokens"), file.needed("tokenizer.ggml.model")
    kinds = get("token_type", [_NORMAL] * len(tokens))
    if not len(set(tokens)) == len(tokens) == len(kinds):
        counts = f"{counted(len(tokens), 'token')}, {len(set(tokens))} of them different, and {len(kinds)} types"
        raise file.refused(f"has {counts}")
    ids = {role: get(f"{name}_token_id", usual if kind == "llama" else None) for role, (name, usual) in _ROLES.items()}
    names = {role: tokens[i] for role, i in ids.items() if i is not None and i < len(tokens)}
    rule = get("pre", "gpt-2")
    if kind == "llama":
        backend = _sentencepiece(get, tokens, kinds, names.get("unk"))
    elif kind == "gpt2" and rule in _SPLITS and not get("add_space_prefix"):
        backend = _byte_level(get, tokens, rule)
    else:
        key = "model" if kind != "gpt2" else "pre" if rule not in _SPLITS else "add_space_prefix"
        known = {"model": "gpt2, llama", "pre": ", ".join(_SPLITS), "add_space_prefix": False}[key]
        raise UnsupportedModel(f"{file.name}: tokenizer.ggml.{key} is {short(str(get(key)))}; known are {known}")
    ends = {tokens[i] for i in end_ids(file)}
    whole = [token for token, each in zip(tokens, kinds, strict=True) if each == _CONTROL or token in ends]
    strips = set(whole) - {"<s>", "<|endoftext|>"} if (kind, file.architecture) == ("llama", "phi3") else ()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=t in strips) for t in whole])
    own = [token for token, each in zip(tokens, kinds, strict=True) if each == _USER_DEFINED and token not in ends]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])
    adds = {"bos": get("add_bos_token", kind == "llama" or rule in _WHOLE_WORDS), "eos": get("add_eos_token", False)}
    if missing := [role for role, is_added in adds.items() if is_added and role not in names]:
        raise file.refused(f"adds {missing[0]} to texts, and tokenizer.ggml.{missing[0]}_token_id is missing")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{role}_token": token for role, token in names.items()},
        **{f"add_{role}_token": is_added for role, is_added in adds.items()},
        model_max_length=most_tokens,
        clean_up_tokenization_spaces=False,
    )
    own_keys = [key for key, text in file.keys.items() if key.startswith(_TEMPLATE) and isinstance(text, str)]
    templates = {key.removeprefix(_TEMPLATE)[1:] or "default": file.keys[key] for key in own_keys}
    tokenizer.chat_template = templates.get("default") if templates.keys() <= {"default"} else templates
    return tokenizer


def end_ids(file: GgufFile, *, by_name: bool = True) -> list[int]:
    """The ids of tokens that end an answer, the file's own end token first; ``by_name`` also those llama.cpp knows."""
    tokens = file.needed("tokenizer.ggml.tokens")
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _END_KEYS] + ["tokenizer.ggml.eog_token_ids"]
    values = (file.keys.get(key, []) for key in keys)
    found = [i for value in values for i in (value if isinstance(value, list) else [value])]
    ends = _ENDS - ({"<|end|>"} if {"<|return|>", "<|call|>"} <= set(tokens) else set())
    named = [i for i, token in enumerate(tokens) if token in ends] if by_name else []
    if wrong := [i for i in found if not 0 <= i < len(tokens)]:
        raise file.refused(f"has the end token {wrong[0]}; it must lie in 0 … {len(tokens) - 1}")
    return list(dict.fromkeys(found + named))


def _checked(file: GgufFile) -> Callable[..., Any]:
    """A function that reads ``tokenizer.ggml.*``; refuses keys that are not known."""
    for key, value in file.keys.items():
        name = key.removeprefix("tokenizer.").removeprefix("ggml.")
        is_known = name in _TAKEN or name in _NOTES or _NO_EFFECT.get(name) == value or key.startswith(_TEMPLATE)
        if key.startswith("tokenizer.") and not is_known:
            raise UnsupportedModel(f"{file.name}: {printable(key)} is {short(repr(value))}, which is not known")
    return lambda name, default=None: file.keys.get(f"tokenizer.ggml.{name}", default)


def _byte_level(get: Callable[..., Any], tokens: list[str], rule: str) -> Tokenizer:
    merges = [(merge[: (cut := merge.index(" ", 1))], merge[cut + 1 :]) for merge in get("merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in _SPLITS[rule]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(get: Callable[..., Any], tokens: list[str], kinds: list[int], unknown: str | None) -> Tokenizer:
    """Of two neighbours those are joined first that make the token with the highest score."""
    scores, has_prefix = get("scores", [0.0] * len(tokens)), get("add_space_prefix", True)
    texts = [text.replace(" ", _SPACE) if kind == _NORMAL else text for text, kind in zip(tokens, kinds, strict=True)]
    vocab = {text: i for i, text in enumerate(texts)}
    normal = [(score, text) for score, text, kind in zip(scores, texts, kinds, strict=True) if kind == _NORMAL]
    halves = ((score, text[:cut], text[cut:]) for score, text in normal for cut in range(1, len(text)))
    known = sorted((each for each in halves if {*each[1:]} <= vocab.keys()), key=lambda each: -each[0])
    merges = [(left, right) for _, left, right in known]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    start = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", _SPACE)])
    end = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return backend
