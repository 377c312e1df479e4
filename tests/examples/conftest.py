"""Examples that compare their weights with earlier ones."""

from tests.torch.driver.conftest import free_comparisons  # noqa: F401 (a fixture)
