// Settings that outlive the page; a browser may forbid keeping them.

export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(`enginewright.${name}`));
  } catch {
    return null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`enginewright.${name}`, JSON.stringify(value));
  } catch {
    // it holds until the page is closed
  }
}
