"""All formats of other projects, in the order in which a file is compared with them."""

from draftheads.formats import dflash, dspark, eagle, gguf, hydra, medusa, mlp_speculator, mtp, small_llama
from draftheads.formats.layout import Format

FORMATS: tuple[Format, ...] = (
    *medusa.FORMATS,
    *hydra.FORMATS,
    *mlp_speculator.FORMATS,
    *dflash.FORMATS,
    *dspark.FORMATS,
    *gguf.FORMATS,
    *eagle.FORMATS,
    *small_llama.FORMATS,
    *mtp.FORMATS,
)
