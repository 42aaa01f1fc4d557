"""Opens a head of another project: which format it is, and a folder of this package's own made from it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import accumulate
from os import PathLike
from pathlib import Path

import torch

from draftheads.checkpoints.checkpoint import save_head, weightless_head
from draftheads.checkpoints.head_files import FORMAT_VERSION
from draftheads.drafters.mixed import node_values
from draftheads.errors import (
    CheckpointCorrupt,
    DraftHeadsError,
    InvalidSettings,
    ModelNotFound,
    StorageError,
    UnsupportedModel,
)
from draftheads.formats import dflash, dflash2, eagle, gguf, llama, medusa, mlp_speculator, mtp
from draftheads.formats.layout import EMBEDDINGS, Format, Layout, Source
from draftheads.models.file_checks import not_finite
from draftheads.models.model import TargetModel
from draftheads.models.model_names import kind_of_folder
from draftheads.speculation.acceptance_profile import MAX_NODES, AcceptanceProfile
from draftheads.utils.cache import cache_folder
from draftheads.utils.messages import first_names

NAMES = "Medusa, Hydra, IBM's MLP speculator, EAGLE, EAGLE-3, P-EAGLE, DFlash, DFlash2, DSpark and MTP layers of models"
_UNREAD = {  # why heads cannot be read, and architectures and model types that are so
    "it reads keys and values of the model's own layers, which heads are not given here": "Gemma4AssistantForCausalLM "
    "Gemma4UnifiedAssistantForCausalLM",
    "its layers have latent attention, and those of heads keys and values of groups": "Eagle3DeepseekV2ForCausalLM "
    "Eagle3DeepseekV3ForCausalLM DeepseekV3ForCausalLMEagle3 EagleDeepSeekMTPModel EagleMistralLarge3ForCausalLM "
    "K3DSparkModel",
    "its layers have experts, and those of heads one feed-forward part": "GptOssForCausalLMEagle3 "
    "Qwen3MoeForCausalLMEagle3 Glm4MoeForCausalLMEagle3 DeepseekV4ForCausalLMDSpark DSparkV41DraftModel",
    "its layers have other parts than those of Llama and Qwen3": "Gemma4DSparkModel DFlashLagunaForCausalLM "
    "EagleLlama4ForCausalLM EagleMiniCPMForCausalLM MuseGlimmerAssistantModel",
    "a GRU over the tokens of the block changes its logits": "DominoDraftModel domino",
    "it refines a block in several passes": "XPressDraftModel Qwen3XPressModel xpress",
    "layers over the lattice of a block score its pairs": "LiLiCorrDraftModel lilicorr",
    "its stages have gates or sizes of their own": "ArcticMLPSpeculatorPreTrainedModel "
    "ArcticLSTMSpeculatorPreTrainedModel MLPVariantSpeculatorPreTrainedModel",
}
REFUSED = {name: why for why, names in _UNREAD.items() for name in names.split()}
_PROJECTS = (medusa, mlp_speculator, dflash2, dflash, gguf, eagle, llama, mtp)
FORMATS: tuple[Format, ...] = tuple(form for project in _PROJECTS for form in project.FORMATS)
# a model on the Hub with the tag mtp is a whole model: its layer is found in its files
_ON_HUB = [project for project in _PROJECTS if project is not mtp and any(form.read for form in project.FORMATS)]
TAGS = tuple(dict.fromkeys(form.name for project in _ON_HUB for form in project.FORMATS))  # of heads that can be read


def is_published(path: Path) -> bool:
    """Whether a file or folder holds a head of another project; false for heads of this package."""
    if path.is_dir() and kind_of_folder(path) == "draft head":
        return False
    try:
        opened = Source(path)
    except DraftHeadsError:
        return path.is_file()  # what is wrong with it is said when it is read
    return _form_of(opened) is not None


def convert(source: str | PathLike[str], out: str | PathLike[str], *, base: TargetModel) -> Layout:
    """Writes a head of another project as one of this package, in the type of its file.

    Args:
        source: its folder or file.
        out: the folder to make.
        base: the model that it was trained for.

    Returns:
        What it was read as.
    """
    if Path(out).exists():
        raise StorageError(f"{out} exists already; choose another folder")
    try:
        opened = Source(Path(source))
        if (form := _form_of(opened)) is None or form.read is None:
            found = f"{source} has the tensors {first_names(opened.shapes)}"
            raise ModelNotFound(f"{found}: they are of no known format, which are {NAMES}")  # noqa: TRY301
        layout = form.read(opened, base)
        tensors = layout.read(opened, base)
    except InvalidSettings as error:
        raise CheckpointCorrupt(f"{source} is no head that can be: {error}") from None
    except DraftHeadsError:
        raise
    except Exception as error:  # a file of others may be wrong in any way
        raise CheckpointCorrupt(f"{source} cannot be read: {error!r}") from error
    if (name := not_finite(tensors.items())) is not None:
        raise CheckpointCorrupt(f"{source}: the tensor {name} has a NaN or infinite number: get it anew")
    types = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = torch.float32 if len(types) > 1 else next(iter(types))
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointCorrupt(f"{source} holds {dtype}; heads are in float32, bfloat16 or float16")
    head = weightless_head(layout.config)
    head.load_state_dict(tensors, strict=True, assign=True)
    card = f"# {layout.config.method} head for {base.model_id}\n\nRead from {layout.format} in {Path(source).name}."
    tree = "of one chain" if layout.tree is None else "of the tree that its files name"
    measured = f"that half of its draft tokens {tree} are accepted, until `draftheads tune` measures it"
    layout = replace(layout, guesses=(*layout.guesses, measured))
    save_head(head, out, base=base, profile=_profile(layout), card=card, dtype=dtype, assumed=layout.guesses)
    return layout


def format_of(shapes: Mapping[str, tuple[int, ...]]) -> Format | None:
    """The format of a head, which may be a part of a model, by the names and shapes of its tensors."""
    return next((form for form in FORMATS if form.fits(shapes)), None)


def _form_of(opened: Source) -> Format | None:
    """The format whose tensors these are.

    Raises:
        UnsupportedModel: the configuration names a kind that cannot be read.
    """
    named = [opened.config.get("architectures"), opened.config.get("speculators_model_type")]
    every = (name for names in named for name in (names if isinstance(names, list) else [names]))
    if (kind := next((name for name in every if isinstance(name, str) and name in REFUSED), None)) is not None:
        raise UnsupportedModel(f"{opened.path} is a head of the kind {kind}, which cannot be read: {REFUSED[kind]}")
    form = format_of(opened.shapes)
    if form is None and EMBEDDINGS & set(opened.shapes):
        raise ModelNotFound(
            f"{opened.path} is a whole model, not a draft head: use it as a draft model, --draft-model "
            f"{opened.config_file.parent} (it has no MTP layer, such as mtp.fc.weight, which would be a head)"
        )
    return form


def _profile(layout: Layout) -> AcceptanceProfile:
    """What is assumed of a head that was not measured here, with the tree that its files name."""
    depth = layout.config.num_heads
    assumed = AcceptanceProfile.assumed(depth)
    if layout.tree is None:
        return assumed
    values = dict(zip(layout.tree.paths, node_values(layout.tree, {}), strict=True))
    likely = sorted(filter(None, values), key=lambda path: (-values[path], len(path), path))[: MAX_NODES - 1]
    tokens = accumulate([1.0, *(values[path] for path in likely)])
    return replace(assumed, paths=[list(path) for path in likely], static_tokens=[round(total, 4) for total in tokens])


def imported_once(source: Path, base: TargetModel) -> Path:
    """The folder in the user's cache with the head of another project, read there at the first use."""
    opened = Source(source)
    facts = [
        *(FORMAT_VERSION, str(source.resolve()), base.model_id, asdict(base.fingerprints)),
        *([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in opened.files),
        opened.config,
        version("draftheads"),
    ]
    folder = cache_folder() / "heads" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    if not folder.is_dir():
        convert(source, folder, base=base)
    return folder
