// Server-sent events of the OpenAI interfaces, as parsed objects.

async function failure(response) {
  try {
    const { error } = await response.json();
    return new Error(error.message ?? String(error));
  } catch {
    return new Error(`the server answered ${response.status}`);
  }
}

// Posts `body` as JSON and yields the object of every `data:` line until [DONE]. An error object, as answer or as event, is thrown.
export async function* events(path, body, headers, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  }
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the connection ended before the answer did");
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const part = JSON.parse(data);
        if (part.error) throw new Error(part.error.message ?? String(part.error));
        yield part;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
