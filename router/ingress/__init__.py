"""The HTTP face: endpoints, the path of one request, its delivery and its errors."""
