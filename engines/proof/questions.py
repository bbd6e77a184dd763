"""What the proof asks: of every graph, and besides where it is wished."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from engines.proof.gates import AUTOCAST_RATIO
from export.precision import POLICIES, Precision
from export.stages import STAGES, components
from ldlm.errors import ConfigError

# The sampler as a whole: proved beside the components, and the stage of what is measured of it.
SAMPLER = "sampler"


class Question(StrEnum):
    """What is asked of a graph.

    Attributes:
        of_formula: whether it is about the formula, as closely as float32 agrees, in every
            precision; otherwise about rounding, in all but float32.
        text: what must hold.
    """

    of_formula: bool
    text: str

    def __new__(cls, name: str, of_formula: bool, text: str) -> Self:
        question = str.__new__(cls, name)
        question._value_, question.of_formula, question.text = name, of_formula, text
        return question

    GRAPH = "graph", True, "the file = the module of the same policy in PyTorch"
    FORMULA = "formula", True, "the file without rounding = float32 PyTorch on the rounded weights"
    PRECISION = (
        "precision", False, f"the file against float32, held to {AUTOCAST_RATIO} x PyTorch's own",
    )  # fmt: skip # the items of a row belong together
    FILE = "file", False, "fp16 in ONNX Runtime, which computes it in float32: it loads and runs"
    KL = "kl", False, "divergence of the token decoder's softmax, held to PyTorch's own"
    TOKENS = "tokens", False, "share of ids that are not PyTorch's choice and no near-tie"
    LOOP = "loop", False, "conditioning and denoiser_step as a denoiser, held to the same"
    LOOP_FILE = "loop file", False, "the same in ONNX Runtime: it loads and runs"
    UPDATE = "update", True, "x_next = A x + B x0_hat + C eps bit for bit, next_step = step + 1"
    TAPS = "taps", True, "the worst equation of a block, or the first that stands out"
    ENGINE = "engine", False, "the engine on the GPU at hand, held to the same"
    ENGINE_UPDATE = "engine update", True, "the engine's update, as closely as float32 agrees"
    DRIFT = "drift", False, "the sampler's estimates over all steps, held to PyTorch's own"
    DRIFT_TOKENS = "drift tokens", False, "share of the sampler's tokens that differ"


@dataclass(frozen=True)
class ProofOptions:
    """What can be asked beyond the comparison of every graph.

    Attributes:
        stress: also export a stressed copy of the checkpoint, and prove that.
        self_test: damage the graphs in every known way, and see who notices.
        taps: compare every equation's intermediate.
        ablate: measure every stage with each of its islands switched off.
        sampler_steps: also sample with this many steps on every runtime; 0 leaves it out.
        runtime: also compare the engines, on this TensorRT and the GPU at hand; "" leaves it out.
    """

    stress: bool = False
    self_test: bool = False
    taps: bool = False
    ablate: bool = False
    sampler_steps: int = 0
    runtime: str = ""

    def components(self, stages: Sequence[str] | None = None) -> list[str]:
        """What is proved: components, and SAMPLER where it is asked for.

        Args:
            stages: names of stages, of components, or SAMPLER; None is all.

        Raises:
            ConfigError: no such name, or the sampler without steps.
        """
        everything = components() + ([SAMPLER] if self.sampler_steps else [])
        if stages is None:
            return everything
        named = {s.name: s.component for s in STAGES} | {name: name for name in everything}
        if unknown := [name for name in stages if name not in named]:
            raise ConfigError("nothing to prove", expected=" or ".join(named), got=unknown[0])
        chosen = {named[name] for name in stages}
        return [name for name in everything if name in chosen]

    def require_possible(self, precisions: Sequence[str]) -> None:
        """Refuse at once what would fail after minutes.

        Raises:
            ConfigError: something that a precision is not for is asked of it.
        """
        for name in precisions:
            self._require_fit(Precision.of(name))
        if self.ablate and not any(Precision.of(name).is_half for name in precisions):
            raise ConfigError(
                "there is no half precision to ablate",
                expected="fp16 or bf16",
                got=", ".join(precisions),
                remedy="export one, and name it",
            )

    def fits(self, name: str) -> bool:
        """Whether all of this can be asked of a precision."""
        with contextlib.suppress(ConfigError):
            self._require_fit(Precision.of(name))
            return True
        return False

    def _require_fit(self, precision: Precision) -> None:
        if self.taps:
            precision.require_floats("the taps are")
        if self.self_test:
            precision.require_floats("the self-test is")
            if precision.is_experiment:  # what a damage would turn to half may be half
                problem = "the self-test is for the policies, not for an experiment"
                raise ConfigError(problem, expected=" or ".join(POLICIES), got=precision.name)
        if self.runtime:
            precision.require(self.runtime)

    def asked(self, component: str) -> tuple[str, ...]:
        """The names of what is asked of a component, or of SAMPLER."""
        if component == SAMPLER:
            return (f"sampler_steps {self.sampler_steps}",)
        names = ("stress", "self_test", "taps", "ablate")
        found = tuple(name for name in names if getattr(self, name))
        return (*found, f"engines on {self.runtime}") if self.runtime else found


NOTHING_MORE = ProofOptions()
