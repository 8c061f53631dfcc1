"""Mistakes: each is one FairMTError that names where it is, what was met and what was expected, and moves nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairmt
from fairmt import Classification, Detection, FairMTError, Regression
from tests.core.models import FEATURES, Model, assert_same_state, criterion_for, loss_of, model_for, problem, state_of

# Mistakes are no types' business here.
BadDetection: Any = Detection
BadClassification: Any = Classification
BadRegression: Any = Regression
bad_cross: Any = fairmt.cross

TASKS: dict[str, Any] = {"ill": Detection(), "traits": Detection(2), "health": Classification(5), "age": Regression()}
GROUPS: dict[str, Any] = {"gender": 2, "race": 3}
ENCODER = nn.Linear(4, 6)
NAN, INF = float("nan"), float("inf")


def heads(**changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "ill": nn.Linear(6, 1),
        "traits": nn.Linear(6, 2),
        "health": nn.Linear(6, 5),
        "age": nn.Linear(6, 1),
    }
    return {name: module for name, module in {**own, **changes}.items() if module is not None}


def fails(message: str, make: Callable[[], object]) -> None:
    with pytest.raises(FairMTError, match=message) as met:
        make()
    assert isinstance(met.value, ValueError)
    assert re.search("expected|missing", str(met.value)), met.value


class Array:
    """Compares item by item, as arrays do, so that a comparison of it has no one truth."""

    def __eq__(self, other: object) -> Any:
        return self

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


SPECIFICATIONS: dict[str, tuple[Callable[[], object], str]] = {
    "no column": (lambda: BadDetection(0), r"Detection\.n: met 0, expected an int of at least 1"),
    "fewer columns": (lambda: BadRegression(-2), r"Regression\.n: met -2"),
    "columns by name": (lambda: BadDetection("ill"), r"Detection\.n: met 'ill'"),
    "columns as truth": (lambda: BadDetection(True), r"Detection\.n: met True"),
    "half a column": (lambda: BadRegression(1.5), r"Regression\.n: met 1\.5"),
    "too few names": (lambda: BadDetection(3, names=["a", "b"]), r"Detection\.names: met \['a', 'b'\], expected 3 "),
    "a name twice": (lambda: BadRegression(2, names=["a", "a"]), r"Regression\.names: met \['a', 'a'\]"),
    "names in a word": (lambda: BadDetection(2, names="ab"), r"Detection\.names: met 'ab'"),
    "names a number": (lambda: BadDetection(2, names=2), r"Detection\.names: met 2"),
    "names as lists": (lambda: BadDetection(2, names=[["a"], ["b"]]), r"Detection\.names: met \[\['a'\], \['b'\]\]"),
    "threshold 0": (
        lambda: BadDetection(threshold=0),
        r"Detection\.threshold: met 0, expected a number between 0 and 1",
    ),
    "threshold 1": (lambda: BadDetection(threshold=1.0), r"Detection\.threshold: met 1\.0"),
    "threshold nan": (lambda: BadDetection(threshold=NAN), r"Detection\.threshold: met nan"),
    "threshold a word": (lambda: BadDetection(threshold="0.5"), r"Detection\.threshold: met '0\.5'"),
    "threshold none": (lambda: BadDetection(threshold=None), r"Detection\.threshold: met None"),
    "temperature 0": (lambda: BadDetection(temperature=0.0), r"Detection\.temperature: met 0\.0, expected a positive"),
    "temperature inf": (lambda: BadClassification(3, temperature=INF), r"Classification\.temperature: met inf"),
    "temperature none": (lambda: BadClassification(3, temperature=None), r"Classification\.temperature: met None"),
    "weight 0": (lambda: BadDetection(weight=0), r"Detection\.weight: met 0, expected a positive"),
    "weight a word": (lambda: BadDetection(weight="Balanced"), r"Detection\.weight: met 'Balanced'"),
    "a weight too few": (
        lambda: BadDetection(2, weight=[1.0]),
        r"Detection\.weight: met \[1\.0\], expected .* 2 of them",
    ),
    "weight an array": (lambda: BadDetection(2, weight=Array()), r"Detection\.weight: met .*Array"),
    "class weights": (lambda: BadClassification(3, weight=[1, 2, 3]), r"Classification\.weight: met \[1, 2, 3\]"),
    "class weight array": (lambda: BadClassification(3, weight=Array()), r"Classification\.weight: met .*Array"),
    "one class": (lambda: BadClassification(1), r"Classification\.num_classes: met 1, expected an int of at least 2"),
    "classes none": (lambda: BadClassification(None), r"Classification\.num_classes: met None"),
    "classes a float": (lambda: BadClassification(3.0), r"Classification\.num_classes: met 3\.0"),
    "loss": (lambda: BadRegression(loss="l2"), r"Regression\.loss: met 'l2', expected one of 'mse', 'mae', 'huber'"),
    "scale 0": (lambda: BadRegression(scale=0.0), r"Regression\.scale: met 0\.0"),
    "a scale too many": (lambda: BadRegression(scale=[1.0, 2.0]), r"Regression\.scale: met \[1\.0, 2\.0\]"),
    "delta": (lambda: BadRegression(loss="huber", delta=-1), r"Regression\.delta: met -1"),
    "one attribute crossed": (lambda: bad_cross("gender"), r"cross: met \('gender',\), expected at least two"),
    "crossed with itself": (lambda: bad_cross("gender", "gender"), r"cross: met \('gender', 'gender'\)"),
    "crossed with a number": (lambda: bad_cross("gender", 2), r"cross: met \('gender', 2\)"),
    "crossed with a list": (lambda: bad_cross("gender", ["race"]), r"cross: met \('gender', \['race'\]\)"),
}


@pytest.mark.parametrize("case", SPECIFICATIONS)
def test_a_bad_task_or_intersection_is_refused(case):
    make, message = SPECIFICATIONS[case]
    fails(message, make)


PROBLEMS: dict[str, tuple[Any, Any, str]] = {
    "no tasks": ({}, GROUPS, r"tasks: met an empty dict, expected a mapping from task name"),
    "tasks none": (None, GROUPS, r"tasks: met NoneType None"),
    "a list of tasks": ([Detection()], GROUPS, r"tasks: met list \[Detection"),
    "an array of tasks": (Array(), GROUPS, r"tasks: met Array"),
    "a task's class": ({"ill": Detection}, GROUPS, r"tasks\['ill'\]: met type .*Detection.*, expected a Detection"),
    "a task's size": ({"ill": 1}, GROUPS, r"tasks\['ill'\]: met int 1"),
    "a task an array": ({"ill": Array()}, GROUPS, r"tasks\['ill'\]: met Array"),
    "a task numbered": ({3: Detection()}, GROUPS, r"tasks: met the name 3, expected a non-empty string"),
    "a task unnamed": ({"": Detection()}, GROUPS, r"tasks: met the name ''"),
    "a task twice": ({"a": Detection(2), "a/1": Regression()}, GROUPS, r"tasks: two of them give .*'a/1'"),
    "a column twice": ({"a": Classification(2), "a=1": Detection()}, GROUPS, r"tasks: two of them .*'gender/a=1'"),
    "no groups": (TASKS, {}, r"groups: met none, expected at least one attribute"),
    "groups none": (TASKS, None, r"groups: met .*None, expected a mapping from attribute name"),
    "a list of groups": (TASKS, ["gender"], r"groups: met .*\['gender'\]"),
    "one group": (TASKS, {"gender": 1}, r"groups\['gender'\]: met 1, expected an int of at least 2"),
    "groups a float": (TASKS, {"gender": 2.0}, r"groups\['gender'\]: met 2\.0"),
    "groups by name": (TASKS, {"gender": ["f", "m"]}, r"groups\['gender'\]: met \['f', 'm'\]"),
    "an attribute numbered": (TASKS, {0: 2}, r"groups: met the name 0"),
    "crossed with nobody": (
        TASKS,
        {"gender": 2} | fairmt.cross("gender", "age"),
        r"groups\['gender\*age'\]: the intersection names 'age', expected an attribute given before it \('gender'\)",
    ),
    "crossed too early": (TASKS, fairmt.cross("gender", "race") | GROUPS, r"the intersection names 'gender'"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_bad_tasks_or_groups_are_refused(case):
    tasks, groups, message = PROBLEMS[case]
    fails(message, lambda: fairmt.FairMT(tasks, groups))


LOSSES = {"ill": 0.5, "traits/0": 0.5, "traits/1": 0.5, "health": 1.0, "age": 2.0}

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "tolerance 0": ({"tolerance": 0}, r"tolerance: met 0, expected a positive"),
    "tolerance a word": ({"tolerance": "0.05"}, r"tolerance: met '0\.05'"),
    "tolerance none": ({"tolerance": None}, r"tolerance: met None"),
    "tolerance nan": ({"tolerance": NAN}, r"tolerance: met nan"),
    "tolerance inf": ({"tolerance": INF}, r"tolerance: met inf"),
    "memory 0": ({"memory": 0}, r"memory: met 0, expected .* at least 1"),
    "memory a word": ({"memory": "20"}, r"memory: met '20'"),
    "memory none": ({"memory": None}, r"memory: met None"),
    "smoothing 0": ({"smoothing": 0}, r"smoothing: met 0, expected a positive"),
    "smoothing a word": ({"smoothing": "10"}, r"smoothing: met '10'"),
    "smoothing none": ({"smoothing": None}, r"smoothing: met None"),
    "mu below 0": ({"mu": -1}, r"mu: met -1, expected a positive"),
    "mu a word": ({"mu": "1"}, r"mu: met '1'"),
    "beta below 0": ({"beta": -1}, r"beta: met -1, expected a number of at least 0"),
    "beta inf": ({"beta": INF}, r"beta: met inf"),
    "beta none": ({"beta": None}, r"beta: met None"),
    "eta_step 0": ({"eta_step": 0}, r"eta_step: met 0, expected a positive"),
    "eta_step none": ({"eta_step": None}, r"eta_step: met None"),
    "eta_step inf": ({"eta_step": INF}, r"eta_step: met inf"),
    "eta_max below 0": ({"eta_max": -1.0}, r"eta_max: met -1\.0"),
    "eta_max none": ({"eta_max": None}, r"eta_max: met None"),
    "alpha_every 0": ({"alpha_every": 0}, r"alpha_every: met 0, expected an int of at least 1"),
    "alpha_every 1.5": ({"alpha_every": 1.5}, r"alpha_every: met 1\.5"),
    "weighting": ({"weighting": "minnorm"}, r"weighting: met 'minnorm', .*did you mean 'min_norm'"),
    "geometry": ({"geometry": "features"}, r"geometry: met 'features', .*did you mean 'feature'"),
    "aggregation": ({"aggregation": "AHFDA"}, r"aggregation: met 'AHFDA', expected one of 'ahfda', 'mean', 'max'"),
    "solver": ({"solver": "frankwolfe"}, r"solver: met 'frankwolfe', expected one of 'exact', 'frank_wolfe'"),
    "dual_on": ({"dual_on": "both"}, r"dual_on: met 'both', expected one of 'hard', 'soft'"),
    "gradient_norm": ({"gradient_norm": "L2"}, r"gradient_norm: met 'L2', expected one of .*'l2'"),
    "encoder_scale": ({"encoder_scale": 1}, r"encoder_scale: met 1, expected one of 'mean', 'sum'"),
    "nonfinite": ({"nonfinite": "ignore"}, r"nonfinite: met 'ignore', expected one of 'raise', 'skip'"),
    "disparities a word": ({"disparities": "aeod"}, r"disparities: met .*'aeod'"),
    "disparities a list": ({"disparities": ["aeod"]}, r"disparities: met .*\['aeod'\]"),
    "disparities of what": ({"disparities": {"detections": None}}, r"disparities: met 'detections', .*'detection'"),
    "disparities unknown": ({"disparities": {"detection": "eod"}}, r"disparities\['detection'\]: met 'eod'.*'aeod'"),
    "disparities listed": ({"disparities": {"detection": ["aeod"]}}, r"disparities\['detection'\]: met \['aeod'\]"),
    "disparities misplaced": ({"disparities": {"regression": "aeod"}}, r"disparities\['regression'\]: met 'aeod'"),
    "disparities off": (
        {"disparities": {"detection": None, "classification": None, "regression": None}},
        r"disparities: met None for every kind",
    ),
    "utility loss 0": ({"max_utility_loss": 0}, r"max_utility_loss: met 0, expected a positive"),
    "utility loss a word": ({"max_utility_loss": "5%"}, r"max_utility_loss: met '5%'"),
    "losses alone": ({"reference_losses": LOSSES}, r"reference_losses: met losses without max_utility_loss"),
    "a loss missing": (
        {"max_utility_loss": 0.1, "reference_losses": {k: v for k, v in LOSSES.items() if k != "age"}},
        r"reference_losses: 'age' is missing",
    ),
    "a head's loss": (
        {"max_utility_loss": 0.1, "reference_losses": {**LOSSES, "trait/0": 1.0}},
        r"reference_losses: met 'trait/0', .*did you mean 'traits/0'",
    ),
    "one loss": ({"max_utility_loss": 0.1, "reference_losses": 0.5}, r"reference_losses: met .*0\.5"),
    "a loss none": (
        {"max_utility_loss": 0.1, "reference_losses": {**LOSSES, "age": None}},
        r"reference_losses\['age'\]: met None",
    ),
    "a loss a word": (
        {"max_utility_loss": 0.1, "reference_losses": {**LOSSES, "age": "x"}},
        r"reference_losses\['age'\]: met 'x'",
    ),
    "a loss of nan": (
        {"max_utility_loss": 0.1, "reference_losses": {**LOSSES, "age": NAN}},
        r"reference_losses\['age'\]: met nan",
    ),
    "a loss of 0": (
        {"max_utility_loss": 0.1, "reference_losses": {**LOSSES, "age": 0.0}},
        r"reference_losses\['age'\]: met 0\.0",
    ),
    "heads in a list": ({"heads": [nn.Linear(6, 1)]}, r"heads: met list, expected a mapping from task name to module"),
    "one head": ({"heads": nn.Linear(6, 1)}, r"heads: met Linear"),
    "a head too many": ({"heads": heads(ills=nn.Linear(6, 1))}, r"heads: met 'ills', .*did you mean 'ill'"),
    "a head missing": ({"heads": heads(health=None)}, r"heads: 'health' is missing, met 'ill', 'traits', 'age'"),
    "a head a function": ({"heads": heads(ill=torch.sigmoid)}, r"heads\['ill'\]: met builtin\w*, expected a torch\.nn"),
    "a head too wide": ({"heads": heads(health=nn.Linear(6, 4))}, r"heads\['health'\]: met 4 outputs, expected 5"),
    "mean without heads": ({"geometry": "mean"}, r"geometry: met 'mean' without heads, expected heads="),
    "shared without full": ({"shared": ENCODER.parameters()}, r"shared: met parameters with geometry='sample'"),
    "full without shared": ({"geometry": "full"}, r"shared: met no parameter"),
    "shared frozen": ({"geometry": "full", "shared": [torch.zeros(2)]}, r"shared: met no parameter"),
    "shared an encoder": ({"geometry": "full", "shared": ENCODER}, r"shared: met .*Linear"),
    "shared layers": ({"geometry": "full", "shared": nn.Sequential(ENCODER)}, r"shared: met .*Linear"),
    "shared by name": ({"geometry": "full", "shared": ENCODER.named_parameters()}, r"shared: met .*tuple"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_option_is_refused(case):
    options, message = OPTIONS[case]
    fails(message, lambda: fairmt.FairMT(TASKS, GROUPS, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 0}, r"epsilon: met 0, expected a positive"),
        ({"epsilon": None}, r"epsilon: met None"),
        ({"mu": 0.0}, r"mu: met 0\.0"),
        ({"mu": None}, r"mu: met None"),
        ({"eta_step": -0.1}, r"eta_step: met -0\.1"),
        ({"tolerance": 0.05}, r"tolerance: .*epsilon"),
        ({"aggregation": "mean"}, r"printed|aggregation"),
        ({"heads": None}, r"geometry: met 'mean' without heads"),
    ],
    ids=str,
)
def test_a_bad_option_of_the_printed_method_is_refused(options, message):
    fails(message, lambda: fairmt.FairMT.paper(TASKS, GROUPS, **{"heads": heads(), **options}))


ROWS, ROW = 24, 7
BATCH = problem(ROWS, health=Classification(5))
Change = Callable[[Any], Any]


def at(value: float, dtype: torch.dtype | None = None) -> Change:
    """The tensor with this value in one row."""

    def change(y: Tensor) -> Tensor:
        y = y.clone() if dtype is None else torch.where(y >= 0, y, 0).to(dtype)
        y[ROW] = value
        return y

    return change


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


# What is changed (argument, name), how, and the message.
CALLS: dict[str, tuple[str, str | None, Change, str]] = {
    "features none": ("features", None, lambda _: None, r"features: met NoneType None, expected a floating tensor"),
    "features in one row": ("features", None, lambda z: z[:, 0], r"features: met a tensor of shape \(24,\)"),
    "features of integers": ("features", None, lambda z: z.long(), r"features: met .*int64"),
    "features elsewhere": ("features", None, on_meta, r"features: met .*meta.*expected cpu"),
    "features of other rows": ("features", None, lambda z: z[:5], r"logits\['ill'\]: met .*\(24, 1\).*\(5, 1\)"),
    "logits none": ("logits", None, lambda _: None, r"logits: met NoneType None, expected a mapping with 'ill'"),
    "logits of one head": ("logits", None, lambda z: z["ill"], r"logits: met a tensor"),
    "logits misnamed": ("logits", None, lambda z: {**z, "il": z["ill"]}, r"logits: met 'il', .*did you mean 'ill'"),
    "logits missing": ("logits", None, lambda z: {"ill": z["ill"]}, r"logits: 'traits' is missing, met 'ill'"),
    "one head's logits none": ("logits", "ill", lambda _: None, r"logits\['ill'\]: met NoneType None"),
    "logits too narrow": ("logits", "health", lambda z: z[:, :4], r"logits\['health'\]: met .*\(24, 4\).*\(24, 5\)"),
    "logits transposed": ("logits", "traits", lambda z: z.T, r"logits\['traits'\]: met .*\(2, 24\).*\(24, 2\)"),
    "logits of fewer rows": ("logits", "ill", lambda z: z[1:], r"logits\['ill'\]: met .*\(23, 1\).*\(24,\)"),
    "logits elsewhere": ("logits", "ill", on_meta, r"logits\['ill'\]: met .*on meta.*on cpu"),
    "decisions for logits": ("logits", "ill", lambda z: (z > 0).long(), r"logits\['ill'\]: met .*int64"),
    "labels none": ("labels", None, lambda _: None, r"labels: met NoneType None, expected a mapping"),
    "labels misnamed": ("labels", None, lambda y: {**y, "helth": y["ill"]}, r"met 'helth', .*did you mean 'health'"),
    "labels missing": ("labels", None, lambda y: {"ill": y["ill"]}, r"labels: 'traits' is missing.*pass None"),
    "labels in a list": ("labels", "ill", lambda y: y.tolist(), r"labels\['ill'\]: met list"),
    "labels by column": ("labels", "traits", lambda y: y[:, 0], r"labels\['traits'\]: met .*\(24,\).*\(24, 2\)"),
    "labels one-hot": (
        "labels",
        "health",
        lambda y: nn.functional.one_hot(y.clamp(min=0), 5),
        r"labels\['health'\]: met .*\(24, 5\).*expected .*\(24, 1\) or \(24,\)",
    ),
    "labels elsewhere": ("labels", "ill", on_meta, r"labels\['ill'\]: met .*on meta"),
    "a 2 in a detection": ("labels", "ill", at(2), r"labels\['ill'\]: met 2 in row 7, expected 0, 1 or missing"),
    "an integer 2": ("labels", "ill", at(2, torch.long), r"labels\['ill'\]: met 2 in row 7"),
    "a 2 among columns": ("labels", "traits", at(2), r"labels\['traits'\]: met 2 in row 7"),
    "-1 among floats": ("labels", "ill", at(-1), r"labels\['ill'\]: met -1 in row 7"),
    "-0.5 in a detection": ("labels", "ill", at(-0.5), r"labels\['ill'\]: met -0\.5 in row 7"),
    "0.3 in a detection": ("labels", "ill", at(0.3), r"labels\['ill'\]: met 0\.3 in row 7"),
    "inf in a detection": ("labels", "ill", at(INF), r"labels\['ill'\]: met inf in row 7"),
    "class 5 of 5": ("labels", "health", at(5), r"labels\['health'\]: met 5 in row 7, expected .* from 0 to 4"),
    "class 1.5": ("labels", "health", at(1.5, torch.double), r"labels\['health'\]: met 1\.5 in row 7"),
    "class -1.0": ("labels", "health", at(-1, torch.double), r"labels\['health'\]: met -1 in row 7"),
    "class inf": ("labels", "health", at(INF, torch.double), r"labels\['health'\]: met inf in row 7"),
    "inf in a regression": (
        "labels",
        "pressure",
        at(INF),
        r"labels\['pressure'\]: met inf in row 7, expected a finite",
    ),
    "-inf in a regression": ("labels", "pressure", at(-INF), r"labels\['pressure'\]: met -inf in row 7"),
    "members none": ("members", None, lambda _: None, r"members: met NoneType None, expected a mapping with 'gender'"),
    "members misnamed": ("members", None, lambda m: {**m, "rase": m["race"]}, r"met 'rase', .*did you mean 'race'"),
    "members missing": ("members", None, lambda m: {"race": m["race"]}, r"members: 'gender' is missing, met 'race'"),
    "members of the intersection": (
        "members",
        None,
        lambda m: {**m, "gender*race": m["race"]},
        r"members: met 'gender\*race', expected one of 'gender', 'race'",
    ),
    "members of floats": ("members", "race", lambda m: m.float(), r"members\['race'\]: met .*float32.*an integer"),
    "members one-hot": ("members", "gender", nn.functional.one_hot, r"members\['gender'\]: met .*\(24, 2\)"),
    "members in a list": ("members", "race", lambda m: m.tolist(), r"members\['race'\]: met list"),
    "members elsewhere": ("members", "race", on_meta, r"members\['race'\]: met .*on meta"),
    "group 3 of 3": ("members", "race", at(3), r"members\['race'\]: met 3 in row 7, expected .* from 0 to 2, or -1"),
    "group -2": ("members", "gender", at(-2), r"members\['gender'\]: met -2 in row 7, expected .* from 0 to 1"),
    "weights in a list": ("weight", None, lambda _: [1.0] * ROWS, r"sample_weight: met list .*expected a tensor"),
    "one weight": ("weight", None, lambda _: 2.0, r"sample_weight: met float 2\.0"),
    "weights too few": ("weight", None, lambda w: w[1:], r"sample_weight: met .*\(23,\).*\(24,\)"),
    "weights in a column": ("weight", None, lambda w: w.unsqueeze(1), r"sample_weight: met .*\(24, 1\)"),
    "weights elsewhere": ("weight", None, on_meta, r"sample_weight: met .*on meta"),
    "a weight of -1": ("weight", None, at(-1), r"sample_weight: met -1 in row 7, expected a finite .* at least 0"),
    "a weight of nan": ("weight", None, at(NAN), r"sample_weight: met nan in row 7"),
    "a weight of inf": ("weight", None, at(INF), r"sample_weight: met inf in row 7"),
}


def called(
    model: Model, criterion: fairmt.FairMT, argument: str = "", name: str | None = None, change: Change = lambda x: x
) -> Tensor:
    """The criterion on the batch with one argument changed."""
    features, logits = model(BATCH.inputs)
    arguments: dict[str, Any] = {
        "features": features,
        "logits": dict(logits),
        "labels": dict(BATCH.labels),
        "members": dict(BATCH.members),
        "weight": torch.ones(ROWS),
    }
    if name is not None:
        arguments[argument][name] = change(arguments[argument][name])
    elif argument:
        arguments[argument] = change(arguments[argument])
    loss: Tensor = criterion(*arguments.values())
    return loss


@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
@pytest.mark.parametrize("case", CALLS)
def test_a_bad_argument_is_refused_and_moves_nothing(case, linear):
    argument, name, change, message = CALLS[case]
    model = model_for(BATCH, linear=linear)
    criterion = criterion_for(BATCH, model, max_utility_loss=0.1)
    called(model, criterion)
    before, last = state_of(criterion), criterion.last
    fails(message, lambda: called(model, criterion, argument, name, change))
    assert_same_state(state_of(criterion), before)
    assert criterion.last is last
    criterion.check()
    assert torch.isfinite(called(model, criterion))


def test_a_message_does_not_print_all_of_a_long_list():
    model = model_for(BATCH)
    with pytest.raises(FairMTError) as met:
        called(model, criterion_for(BATCH, model), "weight", None, lambda _: [1.0] * 10_000)
    assert len(str(met.value)) < 1000


def test_an_output_without_a_gradient_is_refused_only_while_gradients_are_recorded():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model)
    with torch.no_grad():
        features, logits = model(BATCH.inputs)
    fails(
        r"features: neither they nor the logits take a gradient",
        lambda: criterion(features, logits, BATCH.labels, BATCH.members),
    )
    with torch.no_grad():
        assert torch.isfinite(criterion(features, logits, BATCH.labels, BATCH.members))


OTHER_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "another layer's": lambda z: 3 * z + 1,
    "probabilities": torch.sigmoid,
    "of other rows": lambda z: z.flip(0),
}


@pytest.mark.parametrize("case", OTHER_LOGITS)
def test_logits_that_are_not_the_linear_head_s_are_refused_every_time(case):
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model)
    before = state_of(criterion)
    for _ in range(2):
        fails(
            r"heads\['traits'\]: its output on the features is \d+% .*expected logits == head\(features\)",
            lambda: called(model, criterion, "logits", "traits", OTHER_LOGITS[case]),
        )
        assert_same_state(state_of(criterion), before)
    assert torch.isfinite(called(model, criterion))


def test_other_logits_are_refused_after_an_empty_batch_too():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model)
    loss_of(criterion, model, BATCH.rows(slice(0)))
    fails(r"heads\['ill'\]", lambda: called(model, criterion, "logits", "ill", torch.sigmoid))


@pytest.mark.parametrize("geometry", ["sample", "feature", "full"])
def test_features_that_the_heads_did_not_take_are_refused(geometry):
    model = model_for(BATCH, linear=False)
    criterion = criterion_for(BATCH, model, geometry=geometry)
    before = state_of(criterion)
    fails(
        r"features: the logits were not computed from this tensor",
        lambda: called(model, criterion, "features", None, torch.clone),
    )
    assert_same_state(state_of(criterion), before)


@pytest.mark.parametrize("geometry", ["sample", "feature", "full"])
def test_the_logits_of_a_head_cut_off_from_the_features_are_refused_or_served(geometry):
    """A head that is detached from the features (a probe) can't take part in their gradient."""
    model = model_for(BATCH, linear=False)
    criterion = criterion_for(BATCH, model, geometry=geometry)
    with suppress(FairMTError):
        called(model, criterion, "logits", "ill", torch.detach).backward()


def test_the_mean_geometry_needs_linear_heads():
    model = model_for(BATCH, linear=False)
    criterion = criterion_for(BATCH, model, geometry="mean")
    fails(r"geometry: met 'mean' with heads that are not one nn\.Linear", lambda: loss_of(criterion, model, BATCH))


def test_a_linear_head_on_other_features_is_refused_by_the_mean_geometry():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model, geometry="mean")
    fails(
        r"geometry: met 'mean' with heads",
        lambda: called(model, criterion, "features", None, lambda z: torch.cat((z, z), dim=1)),
    )


def test_asking_for_a_certificate_before_a_step_is_refused():
    fails(r"last: met a criterion that was not called yet", lambda: criterion_for(BATCH, model_for(BATCH)).kkt())


STATES: dict[str, dict[str, Any]] = {
    "other names": {
        "tasks": {"ill": Detection(), "traits": Detection(2), "shape": Classification(5), "age": Regression()}
    },
    "another order": {
        "tasks": {"traits": Detection(2), "ill": Detection(), "health": Classification(5), "age": Regression()}
    },
    "fewer tasks": {"tasks": {"ill": Detection()}},
    "another attribute": {"groups": {"gender": 2, "region": 3}},
    "more groups": {"groups": {"gender": 3, "race": 3}},
    "many more groups": {"groups": {"gender": 2, "race": 5}},
    "other sides": {"disparities": {"regression": None}},
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_of_another_problem_is_refused_and_moves_nothing(case):
    options: dict[str, Any] = {"tasks": TASKS, "groups": GROUPS, **STATES[case]}
    other = fairmt.FairMT(**options)
    other.skipped += 5
    other.strength.eta += 1
    criterion = fairmt.FairMT(TASKS, GROUPS)
    before = state_of(criterion)
    fails(r"state: met ", lambda: criterion.load_state_dict(other.state_dict()))
    assert_same_state(state_of(criterion), before)


def test_every_wide_head_is_called_by_its_own_name():
    """The row's head is named, and the classes' number is its own, among several heads of a kind."""
    batch = problem(ROWS, health=Classification(5))
    batch = replace(
        batch,
        tasks={**batch.tasks, "mood": Classification(2)},
        labels={**batch.labels, "mood": torch.zeros(ROWS, dtype=torch.long)},
    )
    model = model_for(batch)
    criterion = criterion_for(batch, model)
    batch.labels["mood"][ROW] = 2
    fails(r"labels\['mood'\]: met 2 in row 7, expected .* from 0 to 1", lambda: loss_of(criterion, model, batch))
    assert model.heads["mood"].in_features == FEATURES
