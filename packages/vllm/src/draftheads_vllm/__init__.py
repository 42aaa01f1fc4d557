"""Draft heads of ``draftheads`` in vLLM: ``draftheads_vllm.HeadProposer`` for its method ``custom_class``."""

from draftheads_vllm.proposer import HeadProposer

__all__ = ["HeadProposer"]
