"""``draftheads merge``: one ordinary model folder with its head in it."""

from draftheads.checkpoints.head_files import HEAD_FOLDER
from draftheads.train.joint.merge import merge
from draftheads.train.options import MergeOptions


def run(options: MergeOptions) -> None:
    """Merges, then prints the command that decodes with it."""
    if added := merge(options):
        print(f"lm_head and embedding were one matrix and are two now: {added / 1e6:,.0f} MB more than the base")
    head = options.out / HEAD_FOLDER
    given = f" --head {head}" if head.is_dir() else ""
    print(f"saved in {options.out}; draftheads generate --model {options.out}{given}")
