"""The dashboard, broken in one place at a time: sessions, tokens, origins, limits, and what viewers are sent."""

from mutants.mutant import Mutant, MutantGroup

_SESSIONS = ("tests/ingress/dashboard/test_dashboard_sessions.py",)
_HTTP = ("tests/ingress/dashboard/test_dashboard_endpoints.py",)
_DATA = ("tests/ingress/dashboard/test_dashboard_data.py",)
_SESSIONS_FILE = "ingress/dashboard/sessions.py"
_ENDPOINTS_FILE = "ingress/dashboard/endpoints.py"

GROUP = MutantGroup(
    tests=(*_SESSIONS, *_DATA, "tests/observe/test_figures.py", *_HTTP),
    mutants=(
        Mutant(
            "an expired session is found",
            _SESSIONS_FILE,
            "self._wall() < session.expires_at",
            "self._wall() > 0",
            _SESSIONS,
        ),
        Mutant(
            "any signature is right",
            _SESSIONS_FILE,
            'if hmac.compare_digest(signature.encode("latin-1"), self._sign("session " + payload).encode()):',
            'if signature != "":',
            _SESSIONS,
        ),
        Mutant(
            "a token is the same for all sessions",
            _SESSIONS_FILE,
            'self._sign("csrf " + payload)',
            'self._sign("csrf ")',
            _SESSIONS,
        ),
        Mutant(
            "pages of the same site are the gateway's own",
            _SESSIONS_FILE,
            'return self._local if request.headers.get(b"sec-fetch-site") == b"same-origin" else None',
            'return self._local if request.headers.get(b"sec-fetch-site", b"").startswith(b"same") else None',
            _SESSIONS,
        ),
        Mutant(
            "an action needs no token",
            _SESSIONS_FILE,
            '    if not hmac.compare_digest(headers.get(CSRF_HEADER, b""), session.csrf.encode()):\n',
            "    if False:\n",
            _SESSIONS,
        ),
        Mutant(
            "an action may come from anywhere",
            _SESSIONS_FILE,
            "    if not is_same_origin(request):\n",
            "    if False:\n",
            _SESSIONS,
        ),
        Mutant(
            "a session may change everything",
            _SESSIONS_FILE,
            "    if not request.target.startswith(_ACTIONS):\n",
            "    if False:\n",
            _SESSIONS,
        ),
        Mutant(
            "wrong admin keys are not counted",
            _SESSIONS_FILE,
            "            self._limiter.failed(address, now)\n",
            "            pass\n",
            _HTTP,
        ),
        Mutant(
            "a session that was signed out is found",
            _SESSIONS_FILE,
            "session.csrf not in self._ended and ",
            "",
            _SESSIONS,
        ),
        Mutant(
            "signing out only deletes the cookie",
            _ENDPOINTS_FILE,
            "                self._sessions.end(session)\n",
            "                pass\n",
            _HTTP,
        ),
        Mutant(
            "the stream of a session that was signed out goes on",
            "ingress/dashboard/feed.py",
            "if session and not self._is_current(session)]",
            "if False]",
            _HTTP,
        ),
        Mutant(
            "scripts can read the cookie",
            _ENDPOINTS_FILE,
            "; HttpOnly; SameSite=Strict",
            "; SameSite=Strict",
            _HTTP,
        ),
        Mutant(
            "the session of a page is found through a proxy",
            _ENDPOINTS_FILE,
            "is_admitted = self._key_check is not None or is_local()",
            "is_admitted = True",
            _HTTP,
        ),
        Mutant(
            "a wrong key falls back to the session",
            "ingress/admin.py",
            "session = None if has_key else self.sessions.find(request)",
            "session = self.sessions.find(request)",
            _HTTP,
        ),
        Mutant(
            "actions of a session are not checked",
            "ingress/admin.py",
            "            check_request(session, request)\n",
            "            pass\n",
            _HTTP,
        ),
        Mutant(
            "any number of viewers",
            "ingress/dashboard/feed.py",
            "if len(self._viewers) >= MAX_VIEWERS:",
            "if False:",
            _HTTP,
        ),
        Mutant(
            "viewers delay a shutdown",
            "ingress/dashboard/feed.py",
            "self._end(list(self._viewers) if self._is_draining() else gone)",
            "self._end(gone)",
            _HTTP,
        ),
        Mutant(
            "a snapshot for every request",
            "ingress/dashboard/data.py",
            "if self._live is None or now >= self._live[0] + FRESH_S:",
            "if True:",
            _DATA,
        ),
        Mutant(
            "the ledger is read for every snapshot",
            "ingress/dashboard/data.py",
            "if self._reading is None and time.monotonic() >= self._next_read_at:",
            "if self._reading is None:",
            _DATA,
        ),
        Mutant(
            "a name is a path",
            "ingress/dashboard/static.py",
            "        file = self._files.get(name)\n",
            '        file = self._files.get(name) or _load(resources.files("inferry") / "observe" / name)\n',
            _HTTP,
        ),
        Mutant(
            "sub-runs are listed as runs",
            "runs/registry.py",
            "roots = [run for run in latest if run.parent is None]",
            "roots = latest",
            _DATA,
        ),
    ),
)
