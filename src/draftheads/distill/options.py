"""The settings of a distillation; the sentence under a field is its help on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from draftheads.data.files import KINDS
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import BUILT_IN
from draftheads.settings import FROM_0, FROM_1, OptionGroup, Precision
from draftheads.utils.counts import counted
from draftheads.utils.messages import keep_variables

_PROMPTS = (
    f'Prompts: files ({KINDS}), or folders of them. "prompt", "messages" or "turns" in each line, or the fields of '
    "ShareGPT, Alpaca, GSM8K and others; their answers are ignored. A model without a chat template continues them as "
    "texts."
)
_DOCUMENTS = (
    f'Texts that the model continues: files ({KINDS}), or folders of them. With "text" in each line. Each is continued '
    "from its beginning, without a chat template. They come after the prompts."
)
NO_CHATS = (
    "has no chat template: it continues prompts of one turn and --documents as texts, and cannot write questions or "
    f"read chats; give --chat-template, a file or {', '.join(BUILT_IN)}, or choose a chat model"
)
_NOT_WITH_ENDPOINT = ("head", "num_self_talk", "documents", "chat_template", "template_variables")


@dataclass(frozen=True, kw_only=True)
class DistillOptions(OptionGroup):
    """Let a model answer prompts and write its answers as training data."""

    out: Path
    """The file to write. One {"messages": [...]} a line, of documents {"prompt": ..., "completion": ...}, as draftheads
    train --data reads them."""
    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(help=_PROMPTS)] = ()
    documents: Annotated[tuple[Path, ...], tyro.conf.arg(help=_DOCUMENTS)] = ()
    num_self_talk: Annotated[int, FROM_0] = 0
    """Conversations in which the model also asks (self-talk). One question each; they come after the prompts."""
    model: str = "smollm2-135m"
    """The model that answers: a name, a folder or a Hugging Face id. With --endpoint its name on the servers."""
    chat_template: str | None = None
    """Chat template in place of the head's or the tokenizer's. A Jinja file, or chatml, hermes, llama-2 or vicuna."""
    template_variables: tuple[str, ...] = ()
    """Values of variables of the chat template, NAME=VALUE. Such as enable_thinking=false. A head keeps them."""
    head: str | None = None
    """A draft head that makes it faster. A name, a folder or a Hugging Face id."""
    temperature: tuple[float, ...] = (0.0,)
    """0 is greedy, above 0 samples. With several values, each prompt gets one at random; repeat a value to use it more
    often."""
    max_new_tokens: Annotated[int, FROM_1] = 256
    """An answer is cut off after this many tokens. The conversation then ends."""
    seed: Annotated[int, FROM_0] = 0
    """Decides every random choice."""
    batch_size: Annotated[int, FROM_1] = 64
    """Conversations that are answered together. With --endpoint, requests at the same time at each server."""
    precision: Precision = "auto"
    """Number format of the model. auto is bf16 if the processor or GPU computes in it, else fp16 on a GPU and fp32 on a
    CPU."""
    endpoint: tuple[str, ...] = ()
    """Ask these OpenAI-compatible servers, not a local model: http://host:port/v1. All must serve the same model. If
    one fails, the others go on."""
    api_key_env: tuple[str, ...] = ()
    """The environment variable with the servers' key. Or one for each server, in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("temperature", fine=bool(self.temperature), fix="give at least one value")
        is_possible = all(0 <= t < float("inf") for t in self.temperature)
        self._require("temperature", fine=is_possible, fix="give 0 (greedy) or positive numbers")
        self._require("out", fine=self.out.suffix != ".gz", fix="compress the file when it is complete")
        keep_variables(self)
        if not (self.prompts or self.documents or self.num_self_talk):
            raise InvalidSettings("nothing to answer: give --prompts FILE…, --documents FILE… or --num-self-talk N")
        for name in _NOT_WITH_ENDPOINT:
            fine = not self.endpoint or getattr(self, name) == getattr(DistillOptions, name)
            self._require(name, fine=fine, fix=f"not used with --endpoint {' '.join(self.endpoint)}; leave it out")
        keys, servers = len(self.api_key_env), len(self.endpoint)
        fix = f"{counted(keys, 'name')} for {counted(servers, 'address')} of --endpoint; give one, or one for each"
        self._require("api_key_env", fine=keys in {0, min(servers, 1), servers}, fix=fix)
