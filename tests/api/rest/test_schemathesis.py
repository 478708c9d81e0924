"""Requests made from the committed OpenAPI document, right and wrong ones, against a real service: never a 5xx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error

pytestmark = pytest.mark.xdist_group("service")
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "openapi.json"
# A wait for changes is meant to be slow, and starting jobs is tested end to end.
schema = schemathesis.openapi.from_path(DOCUMENT).exclude(path="/api/changes").exclude(path="/jobs", method="POST")


@schema.parametrize()
@hypothesis.settings(max_examples=6, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_no_request_makes_the_service_fail(case: schemathesis.Case, live_service: Any) -> None:
    response = case.call(base_url=live_service.url)
    case.validate_response(response, checks=[not_a_server_error])
