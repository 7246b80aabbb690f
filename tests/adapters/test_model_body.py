"""The body of a model."""

import pytest
from logprobd_adapters.model_body import body_of


def test_a_model_without_a_separate_body_is_refused() -> None:
    class Headless:
        @property
        def base_model(self):
            return self

    with pytest.raises(ValueError, match="Headless has no separate body: use the framework's own"):
        body_of(Headless())
