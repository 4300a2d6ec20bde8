"""The conformance suite: identical workloads on every backend, each case in its own process.

Run it on any installed backend with
`pytest --pyargs xmem.conformance -p xmem.conformance.plugin --backend NAME`.
"""
