"""The settings of a distillation; the sentence under a field is its help on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from draftheads.data.files import KINDS
from draftheads.errors import InvalidSettings
from draftheads.models.chat_template import BUILT_IN
from draftheads.settings import Precision
from draftheads.speculation.drafting import Drafting
from draftheads.utils.option_group import ABOVE_0, FROM_0, FROM_1, SHARE, OptionGroup, Range
from draftheads.utils.template_variables import keep_variables

_PROMPTS = (
    f'Prompts: files ({KINDS}), or folders of them. "prompt", "messages" or "turns" in each line, or the fields of '
    "ShareGPT, Alpaca, GSM8K and others; their answers are ignored. A model without a chat template continues them as "
    "texts."
)
_DOCUMENTS = (
    f'Texts that the model continues: files ({KINDS}), or folders of them. With "text" in each line. Each is continued '
    "from its beginning, without a chat template. They come after the prompts."
)
_CHUNK_BATCHES = 8  # at the end of a chunk the batch is not full: this costs a tenth of the speed at this size
_SAMPLED = Range(
    "must be above 0 and finite: greedy questions would all be the same", lambda value: 0 < value < float("inf")
)
NO_CHATS = (
    "has no chat template: it continues prompts of one turn and --documents as texts, and cannot write questions or "
    f"read chats; give --chat-template, a file or {', '.join(BUILT_IN)}, or choose a chat model"
)
_NOT_WITH_ENDPOINT = {
    "head": None,
    "num_self_talk": 0,
    "turns": None,
    "documents": (),
    "chat_template": None,
    "template_variables": (),
    "device": None,
    "four_bit": False,
}  # with the only value that is allowed


@dataclass(frozen=True, kw_only=True)
class DistillOptions(OptionGroup):
    """Let a model answer prompts and write its answers as training data."""

    out: Path
    """The file to write. One {"messages": [...]} a line, of documents {"prompt": ..., "completion": ...}, as draftheads
    train --data reads them."""
    prompts: Annotated[tuple[Path, ...], tyro.conf.arg(help=_PROMPTS)] = ()
    documents: Annotated[tuple[Path, ...], tyro.conf.arg(help=_DOCUMENTS)] = ()
    document_tokens: Annotated[int, FROM_1] = 64
    """With --documents: how many tokens of each text the model reads. Shorter texts are read whole."""
    num_self_talk: Annotated[int, FROM_0] = 0
    """Conversations in which the model also asks (self-talk). They come after the prompts."""
    turns: Annotated[int | None, FROM_1] = None
    """Self-talk that begins with the first turn of each prompt. The model writes the user's next turns, up to this many
    in all. Default: the turns of the file."""
    model: str = "smollm2-135m"
    """The model that answers. A name, a folder or a Hugging Face id."""
    chat_template: str | None = None
    """Chat template in place of the head's or the tokenizer's. A Jinja file, or chatml, hermes, llama-2 or vicuna."""
    template_variables: tuple[str, ...] = ()
    """Values of variables of the chat template, NAME=VALUE. Such as enable_thinking=false. A head keeps them."""
    head: str | None = None
    """A draft head that makes it faster. A name, a folder or a Hugging Face id."""
    tree: str = "auto"
    """What is drafted, as for `draftheads generate`."""
    temperature: tuple[float, ...] = (0.0,)
    """0 is greedy, above 0 samples. With several values, each prompt gets one at random; repeat a value to use it more
    often."""
    top_k: Annotated[int | None, FROM_1] = None
    """Sample among the k most likely tokens only."""
    top_p: Annotated[float, SHARE] = 1.0
    """Sample among the most likely tokens of this probability. That is, that together reach it."""
    max_new_tokens: Annotated[int, FROM_1] = 256
    """An answer is cut off after this many tokens. The conversation then ends."""
    self_talk_turns: Annotated[int, FROM_1] = 1
    """Questions in a conversation of --num-self-talk."""
    self_talk_temperature: Annotated[float, _SAMPLED] = 1.0
    """Temperature of self-talk questions. Their answers have --temperature."""
    max_question_tokens: Annotated[int, FROM_1] = 256
    """A self-talk question that is longer is dropped."""
    seed: int = 0
    """Decides every random choice."""
    batch_size: Annotated[int, FROM_1] = 64
    """Conversations that are answered together."""
    chunk_size: Annotated[int | None, FROM_1] = None
    """Conversations that are saved together. Default: eight batches. A kill loses at most this much work."""
    precision: Precision = "auto"
    """Number format of the model. auto is bf16 if the processor or GPU computes in it, else fp16 on a GPU and fp32 on a
    CPU."""
    device: str | None = None
    """Where the model runs: cpu, cuda or cuda:1. Default: CUDA if there is one."""
    four_bit: bool = False
    """Hold the linear layers in 4 bits (needs bitsandbytes). Less memory; it changes the model a little."""
    endpoint: str | None = None
    """Ask this OpenAI-compatible server, not a local model. http://host:port/v1"""
    endpoint_model: str | None = None
    """The model's name on that server."""
    api_key_env: str | None = None
    """The environment variable with the server's key."""
    request_timeout: Annotated[float, ABOVE_0] = 600.0
    """Seconds to wait for an answer of the server."""
    request_retries: Annotated[int, FROM_0] = 6
    """How often a request is repeated. When the server is busy, fails or cannot be reached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = Drafting(self.head, tree=self.tree)  # raises what is impossible
        self._require(
            "turns", fine=self.turns is None or bool(self.prompts), fix="give --prompts, too, or leave it out"
        )
        self._require("temperature", fine=bool(self.temperature), fix="give at least one value")
        is_possible = all(0 <= t < float("inf") for t in self.temperature)
        self._require("temperature", fine=is_possible, fix="give 0 (greedy) or positive numbers")
        self._require("out", fine=self.out.suffix != ".gz", fix="compress the file when it is complete")
        keep_variables(self)
        if not (self.prompts or self.documents or self.num_self_talk):
            raise InvalidSettings("nothing to answer: give --prompts FILE…, --documents FILE… or --num-self-talk N")
        self._check_endpoint()

    @property
    def chunk(self) -> int:
        return self.chunk_size or _CHUNK_BATCHES * self.batch_size

    def _check_endpoint(self) -> None:
        if (self.endpoint is None) != (self.endpoint_model is None):
            raise InvalidSettings(
                f"--endpoint is {self.endpoint!r} and --endpoint-model is {self.endpoint_model!r}: give both or neither"
            )
        for name, value in _NOT_WITH_ENDPOINT.items():
            fine = self.endpoint is None or getattr(self, name) == value
            self._require(name, fine=fine, fix=f"not used with --endpoint {self.endpoint}; leave it out")
