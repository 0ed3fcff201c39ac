"""The Kubernetes backend: each attempt in a pod of its own.

`cluster` says what is asked of an API server and `http` asks it; `manifests` and `classification` are pure; `watching`
keeps one list+watch for a run; `gateway` is where the init of a pod dials in; `backend` puts them together.
"""
