"""Drafts on a tree of your own, and checks that the text does not change.

python examples/custom_tree.py --model smollm2-135m --head hydra
"""

import tyro

import draftheads

PROMPT = "Why is the sky blue?"


def main(model: str = "smollm2-135m", head: str = "hydra", max_new_tokens: int = 64) -> None:
    # the two most probable first tokens, two after the first of them, one after the second
    tree = draftheads.Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    print(tree.draw())
    plain = draftheads.load(model, precision="fp32").generate([PROMPT], max_new_tokens=max_new_tokens)[0]
    for shape in (tree, draftheads.BestFirst(num_nodes=6)):  # a static tree, and one that grows at each step
        engine = draftheads.load(model, head=head, tree=shape, precision="fp32")
        result = engine.generate([PROMPT], max_new_tokens=max_new_tokens)[0]
        same = "the same text as" if result.token_ids == plain.token_ids else "another text than"
        print(f"{result.tokens_per_step:.2f} tokens per step, {same} plain decoding")


if __name__ == "__main__":
    tyro.cli(main)
