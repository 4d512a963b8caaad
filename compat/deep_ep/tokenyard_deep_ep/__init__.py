"""The end of ``sys.path``: it holds ``deep_ep`` and ``deep_ep_cpp``. Nobody imports it as a
package.
"""
