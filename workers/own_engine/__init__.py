"""What both engines of ours share: Serve's protocol, OpenAI's shapes, KV events."""
