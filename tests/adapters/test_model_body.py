"""The body of a model."""

import pytest
from logprobd_adapters.model_body import body_of, without_cache


def test_a_model_without_a_separate_body_is_refused() -> None:
    class Headless:
        @property
        def base_model(self):
            return self

    with pytest.raises(ValueError, match="Headless has no separate body: use the framework's own"):
        body_of(Headless())


class WithCache:
    def forward(self, tokens, use_cache=None):
        pass


class WithKeywords:
    def forward(self, tokens, **keywords):
        pass


class WithoutCache:
    def forward(self, tokens):
        pass


def test_a_model_is_asked_for_no_cache_if_it_has_one() -> None:
    assert without_cache(WithCache()) == without_cache(WithKeywords()) == {"use_cache": False}
    assert without_cache(WithoutCache()) == {}
