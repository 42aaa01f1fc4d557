"""``draftheads merge``: one ordinary model folder with its head in it."""

from draftheads.train.joint.merge import MergeOptions, merge
from draftheads.train.joint.run import HEAD_FOLDER


def run(options: MergeOptions) -> None:
    """Merges, then prints the command that decodes with it."""
    merge(options)
    print(f"saved in {options.out}; draftheads generate --model {options.out} --head {options.out / HEAD_FOLDER}")
