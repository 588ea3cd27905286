"""Seconds of a training whose target lives in an engine: states made first and then learned from, and both at once."""
import json, sys, time
from contextlib import contextmanager
from pathlib import Path
import transformers
from outrider.distill import distill
from outrider.distill.engine_states import EngineStates
from outrider.recipes import Recipe, load_recipe
from outrider.train import train

how, out, python, path, data, *more = sys.argv[1:]
marks = {}
running = EngineStates.running
@contextmanager
def timed(self, probes):
    with running(self, probes) as ready:
        marks["ready"] = time.monotonic()
        yield ready
        marks["made"] = time.monotonic()
EngineStates.running = timed
of = EngineStates.of
learn = transformers.Trainer.train
def trained(self, *a, **k):
    marks["train"] = time.monotonic(); c = time.process_time()
    r = learn(self, *a, **k)
    marks["trained"] = time.monotonic(); marks["cpu"] = time.process_time() - c
    return r
transformers.Trainer.train = trained
recipe = load_recipe("embedded-eagle3", [f"output={out}", f"data.responses={data}", "data.holdout=0", f"target.path={path}", *more])
values = recipe.model_dump()
values["data"]["features"] = how
recipe = Recipe.from_dict(values | {"target": values["target"] | {"engine": {"python": python, "check": "logits", "concurrency": 2}}})
r = train(recipe)
m = marks
fill = m["made"] - m["ready"] if how == "cached" else 0.0
print(json.dumps({"how": how, "fill": fill, "training": m["trained"] - m["train"], "total": fill + m["trained"] - m["train"], "cpu": m["cpu"], "steps": r.steps}))
