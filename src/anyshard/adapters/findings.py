"""What a load finds out before it changes anything: what is selected, what differs, and what the report will say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

from anyshard.errors import Difference, Mismatch
from anyshard.options import LoadOptions
from anyshard.records.addresses import Globs, section_of

_PRESENT = "in the checkpoint"


@final
class _Glob:
    """One glob of `only` or `exclude`."""

    def __init__(self, glob: str) -> None:
        self._itself = Globs((glob,))
        # No set ends in a star, so that trailing ones are always a token of their own.
        self._before_star = Globs((glob.rstrip("*"),) if glob.endswith("*") else ())

    def matches(self, address: str) -> bool:
        return self._itself.match(address)

    def matches_whole(self, address: str) -> bool:
        """Whether it matches the address, or anything right below it, whatever that is called."""
        return self._itself.match(address) or self._before_star.match(f"{address}/")


@final
class Selection:
    """Which addresses `only` and `exclude` let through; remembers the globs that matched nothing."""

    def __init__(self, only: Sequence[str], exclude: Sequence[str]) -> None:
        self._only = {glob: _Glob(glob) for glob in only}
        self._exclude = {glob: _Glob(glob) for glob in exclude}
        self._used: set[str] = set()

    def takes(self, address: str) -> bool:
        """Whether a tensor is selected."""
        return self._lets_through(lambda glob: glob.matches(address))

    def takes_whole(self, address: str) -> bool:
        """Whether something that is loaded as one is selected: by its address, or by a glob for all below it (`a/*`, `a/**`)."""
        return self._lets_through(lambda glob: glob.matches_whole(address))

    def list_unused(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The globs of `only` and of `exclude` that have matched nothing so far."""
        return tuple(g for g in self._only if g not in self._used), tuple(g for g in self._exclude if g not in self._used)

    def _lets_through(self, matches: Callable[[_Glob], bool]) -> bool:
        # Every glob is asked, so that each one that matches counts as used.
        excluded = self._match(self._exclude, matches)
        wanted = self._match(self._only, matches)
        return not excluded and (wanted or not self._only)

    def _match(self, globs: dict[str, _Glob], matches: Callable[[_Glob], bool]) -> bool:
        if not globs:
            return False
        used = [glob for glob, compiled in globs.items() if matches(compiled)]
        self._used.update(used)
        return bool(used)


@final
class Findings:
    """Differences and remarks, gathered over the whole app state so that one error can list them all.

    Without `judge_surplus`, what only the checkpoint has and globs without a match are listed apart, and are no differences:
    other ranks may have them.
    """

    def __init__(self, options: LoadOptions, *, judge_surplus: bool = True) -> None:
        self.options = options
        self.judges_surplus = judge_surplus
        self.selection = Selection(options.only, options.exclude)
        self.differences: list[Difference] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.surplus: list[str] = []
        self.surplus_extra_state: list[str] = []
        self.replaced_values: list[str] = []
        self.created: list[str] = []
        self.warnings: list[str] = []
        self._num_matched: Counter[str] = Counter()

    def differ(self, kind: Mismatch, address: str, *, expected: str, found: str) -> None:
        """Record a difference that is an error however strict the load is."""
        self.differences.append(Difference(kind, address, expected, found))

    def refuse(self, address: str, *, expected: str, found: str) -> None:
        """Record that a selected node is of another kind than the stored one."""
        if self.selection.takes_whole(address):
            self.differ(Mismatch.KIND, address, expected=expected, found=found)

    def match(self, address: str) -> None:
        """Record that the app state and the checkpoint both have this address."""
        self._num_matched[section_of(address)] += 1

    def miss(self, address: str, *, expected: str = _PRESENT, found: str = "not stored") -> None:
        """Record an address of the app state that the checkpoint lacks: an error if strict, else left alone."""
        self.missing.append(address)
        if self.options.strict:
            self.differ(Mismatch.MISSING, address, expected=expected, found=found)

    def surprise(self, address: str) -> None:
        """Record a selected address of the checkpoint that the app state lacks: an error if strict and if it is ours to judge."""
        if not self.judges_surplus:
            self.surplus.append(address)
            return
        self.unexpected.append(address)
        if self.options.strict:
            self.differ(Mismatch.UNEXPECTED, address, expected="in the app state", found="only in the checkpoint")

    def warn(self, sentence: str) -> None:
        """Put a sentence into the report."""
        self.warnings.append(sentence)

    def check_matches(self, sections: tuple[str, ...]) -> None:
        """Refuse a load that would do nothing: globs of `only` without a match, sections with no address in common."""
        if self.judges_surplus:
            useless, unused = self.selection.list_unused()
            for glob in useless:
                self.differ(Mismatch.MISSING, glob, expected="an address that this glob of only= matches", found="none")
            for glob in unused:
                self.warn(f"exclude={glob!r} matched no address")
        if not self.options.strict:
            self._check_each(sections)

    def list_unmatched(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The globs of `only` and of `exclude` without a match that other ranks may have one for."""
        return ((), ()) if self.judges_surplus else self.selection.list_unused()

    def _check_each(self, sections: tuple[str, ...]) -> None:
        """A section that is not stored at all may be left out, but not all of them."""
        num_missing = Counter(map(section_of, self.missing))
        for address in sections:
            name = section_of(address)
            is_left_out = address in self.missing and self._num_matched.total() > 0
            if num_missing[name] and not self._num_matched[name] and not is_left_out:
                found = f"none of {num_missing[name]}"
                self.differ(Mismatch.MISSING, address, expected="an address that the checkpoint has too", found=found)
