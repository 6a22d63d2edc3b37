"""What a user may set of SWIFT, and which values are refused."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.method import Method
from skipstone.decoding.settings import setting, whole_number
from skipstone.methods.shared import profiles
from skipstone.methods.shared.confidence import check_threshold
from skipstone.methods.shared.layer_sets import Space
from skipstone.methods.swift.search import SEARCHES
from skipstone.models.layered import LayeredModel


@dataclass(frozen=True)
class SwiftSettings(Method):
    """The hyper-parameters of the paper (appendix B.2), and those of what is ours."""

    name: ClassVar[str] = "swift"
    aliases: ClassVar[dict[str, str]] = {"num_assistant_tokens": "num_speculative_tokens"}
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that this model does not bear skipping so many sublayers."
    )

    skip_ratio: float = setting(
        0.45, "share of the sublayers between the first and the last layer that drafting leaves out, at the start."
    )
    num_speculative_tokens: int = setting(25, "most drafts a step.")
    confidence_threshold: float | Literal["adaptive"] | None = setting(
        0.8, "stop after a draft whose probability is below it; None never stops early."
    )
    context_window: int = setting(32, "generated tokens that a layer set is judged by.")
    search: str = setting("linear_ts", "linear_ts, swift (the paper's), random or uniform (none).")
    objective: Literal["speed", "matchness"] = setting("speed", '"speed" or the paper\'s "matchness".')
    max_steps: int = setting(1000, "evaluations after which the search ends.")
    patience: int = setting(300, "evaluations without a better set after which it ends.")
    enough: float = setting(0.95, "matchness at which it ends.")
    dynamic_verification: bool = setting(True, "runners-up are verified too.")
    adjust: bool = setting(True, "the skip ratio moves to where more is expected.")
    guard: bool = setting(True, "draft only where that pays.")
    profile: str | None = setting(None, "a file of `skipstone search`, instead of a search.")
    search_seed: int = setting(0, "of the search; it changes speed and never the text.")

    def check(self, model: LayeredModel) -> None:
        space = Space(model.depth)
        if isinstance(self.skip_ratio, bool) or not isinstance(self.skip_ratio, (int, float)) or not 0 <= self.skip_ratio < 1:
            raise ValueError(f"skip_ratio must lie in [0, 1), found {self.skip_ratio!r}")
        if not 0 < space.count(self.skip_ratio) < space.size:
            raise ValueError(
                f"skip_ratio={self.skip_ratio} leaves out {space.count(self.skip_ratio)} of the {space.size} sublayers that "
                f"may be skipped in a model of {model.depth} layers: at least one must go and one must stay"
            )
        for name, least in (("num_speculative_tokens", 1), ("context_window", 1), ("max_steps", 0), ("patience", 1)):
            whole_number(name, getattr(self, name), least)
        whole_number("search_seed", self.search_seed, 0)
        check_threshold(self.confidence_threshold)
        for name in ("dynamic_verification", "adjust", "guard"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if isinstance(self.enough, bool) or not isinstance(self.enough, (int, float)) or not 0 <= self.enough <= 1:
            raise ValueError(f"enough is a matchness in [0, 1], found {self.enough!r}")
        if self.search not in SEARCHES:
            raise ValueError(f"unknown search {self.search!r}; there are {', '.join(SEARCHES)}")
        if self.objective not in ("speed", "matchness"):
            raise ValueError(f'objective must be "speed" or "matchness", found {self.objective!r}')
        if self.profile is not None:
            space.from_skip_set(profiles.load(self.profile, model.model).skip)
