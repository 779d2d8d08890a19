"""Chat templates that reach for what they must not have, and fail in every way that a template can.

None takes much time or memory: a sandbox does not bound these, which is why operators have to allow callers' templates.
"""

from __future__ import annotations

from hypothesis import strategies as st

_EXPRESSIONS = (
    "messages",
    "messages[0].content",
    "messages[99].content",
    "messages[0].content.upper().nothing.at.all",
    "tools",
    "variable",
    "variable.items()",
    "self",
    "self.__init__",
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__.__init__.__globals__",
    "cycler.__init__.__globals__.os.environ",
    "lipsum.__globals__['os'].popen('id').read()",
    "messages | map(attribute='__class__') | list",
    "messages | attr('__len__')",
    "messages.append(1)",
    "messages.clear()",
    "namespace(a=messages).a",
    "'{0.__class__.__init__.__globals__}'.format(messages)",
    "'%s %s' % (1,)",
    "'%(a)s' % messages",
    "range(10 ** 7) | list",
    "1 / 0",
    "10 ** 5000",
    "[1, 2] | sum(start='')",
    "messages | tojson(indent=400)",
    "messages | sort",
    "raise_exception(messages[0].content)",
    "raise_exception(messages)",
    "raise_exception()",
    "strftime_now('%Y\\ud800')",
    "strftime_now(1)",
    "'\\ud800'",
    "'\\x00' * 300",
    "caller()",
    "loop.index",
    "undefined_function()",
    "messages | no_such_filter",
    "messages is no_such_test",
)
_STATEMENTS = (
    "{{% for m in {0} %}}{{{{ m }}}}{{% endfor %}}",
    "{{% for m in {0} recursive %}}{{{{ loop(m) }}}}{{% endfor %}}",
    "{{% if {0} %}}a{{% else %}}b{{% endif %}}",
    "{{% set messages = {0} %}}",
    "{{% set a.b = {0} %}}",
    "{{% macro again() %}}{{{{ again() }}}}{{% endmacro %}}{{{{ again() }}}}",
    "{{% include 'a' %}}",
    "{{% import 'a' as b %}}",
    "{{% extends {0} %}}",
    "{{% generation %}}{{{{ {0} }}}}{{% endgeneration %}}",
    "{{% break %}}",
    "{{% for m in messages %}}{{% continue %}}{{% endfor %}}",
    "{{% raw %}}{{{{ x }}}}{{% endraw %}}",
    "{{% call {0} %}}x{{% endcall %}}",
    "{{% filter upper %}}{{{{ {0} }}}}{{% endfilter %}}",
    "{{% set ns = namespace() %}}{{% set ns.x = {0} %}}{{{{ ns.x }}}}",
    "{{# {0} #}}",
    "{{% {0} %}}",
    "{{{{ {0} }}",
    "{{{{ {0} }}}}",
    "{{{{ ({0}) | string | length }}}}",
)
_TEXTS = ("", "hello ", "\n", "{%", "}}", "{{ '(' }}" * 40, "{{" + "(" * 300 + "1" + ")" * 300 + "}}")

_parts = st.builds(str.format, st.sampled_from(_STATEMENTS), st.sampled_from(_EXPRESSIONS)) | st.sampled_from(_TEXTS)
templates = st.lists(_parts, min_size=1, max_size=4).map("".join)
