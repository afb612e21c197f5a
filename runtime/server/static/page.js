// Starts the page: the playground, the live view, the colours.
import { startChat } from "./chat.js";
import { startLive } from "./live.js";
import { recall, remember } from "./settings.js";

function startTheme(changed) {
  const choice = document.getElementById("theme");
  const apply = () => {
    document.documentElement.dataset.theme = choice.value;
    changed();
  };
  choice.value = recall("theme") ?? "";
  if (choice.selectedIndex < 0) choice.value = "";
  choice.addEventListener("change", () => {
    remember("theme", choice.value);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply();
}

const { headers } = startChat();
const { redraw } = startLive(headers);
startTheme(redraw);
