"""Check the compiled look-up on the CPU."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from look_up_checks import Case, LookUpChecks

from dyntree_kernels.cpu.look_up import look_up

TEXTS = st.integers(1, 4).flatmap(
    lambda letters: st.lists(st.integers(0, letters - 1), min_size=1, max_size=200)
)
CASES = st.builds(Case, st.integers(1, 64), st.integers(1, 64), st.integers(1, 250))


class TestTheCompiledLookUp(LookUpChecks):
    look_up = staticmethod(look_up)

    @settings(deadline=None)
    @given(text=TEXTS, repeated=st.integers(1, 5), case=CASES)
    def test_the_law_holds_for_every_text(self, text: list[int], repeated: int, case: Case) -> None:
        self.obeys([text * repeated], case)
