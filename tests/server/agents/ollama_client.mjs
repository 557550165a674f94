// A tool turn with Ollama's own JavaScript client: node ollama_client.mjs PACKAGE_DIR URL
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [folder, url] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const { Ollama } = await import(pathToFileURL(require.resolve('ollama')).href);
const ollama = new Ollama({ host: url });
const model = (await ollama.list()).models[0].name;
const tools = [{
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'The weather at a place',
    parameters: { type: 'object', properties: { place: { type: 'string' } }, required: ['place'] },
  },
}];
const messages = [{ role: 'user', content: 'Weather in Bern?' }];
const first = await ollama.chat({ model, messages, tools });
messages.push(first.message);
for (const call of first.message.tool_calls ?? []) {
  messages.push({ role: 'tool', tool_name: call.function.name, content: `${call.function.arguments.place}: sun` });
}
let text = '';
for await (const part of await ollama.chat({ model, messages, tools, stream: true })) text += part.message.content;
const shown = await ollama.show({ model });
console.log(JSON.stringify({ calls: first.message.tool_calls, text, capabilities: shown.capabilities }));
