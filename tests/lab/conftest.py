"""The fixtures of the rooms that the lab's verbs and drafters are tested with."""

from ..eval.conftest import suites  # noqa: F401
from ..heads.conftest import target  # noqa: F401
from ..scripts.conftest import changed_target, outrider, recipe_file, target_folder  # noqa: F401
from ..serving.conftest import start_server  # noqa: F401
