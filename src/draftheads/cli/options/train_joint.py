"""Options of ``draftheads train-joint``: :mod:`draftheads.train.joint.options`."""

from functools import partial

from draftheads.cli.options.train import defaults as defaults_of
from draftheads.train.joint.options import JointOptions

defaults = partial(defaults_of, options=JointOptions)
