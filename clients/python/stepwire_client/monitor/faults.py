"""Which ends of calls are our faults and not the callers': one set for dashboards, alerts and `top`. Data only."""

from __future__ import annotations

FAULT_CODES = ("INTERNAL", "UNAVAILABLE", "UNKNOWN", "DATA_LOSS")
# The same over HTTP. Those of a deadline (504) and of what is not offered (501) are the callers'.
FAULT_STATUSES = ("500", "503")

RPCS, HTTP = "stepwire_frontend_rpcs_handled_total", "stepwire_frontend_http_requests_total"
# Health checks and reflection are no requests of users.
USERS_RPCS = 'grpc_method!~"/grpc[.].*"'
USERS_HTTP = 'handler!="/health"'
FAULTY_RPCS = f'{USERS_RPCS},grpc_code=~"{"|".join(FAULT_CODES)}"'
FAULTY_HTTP = f'{USERS_HTTP},status=~"{"|".join(FAULT_STATUSES)}"'
